// Pointer and keyboard of the map.

const STILL = 3; // pixels by which a finger that clicks may move
const KEPT = 1; // pixels by which a lasso with fewer corners may differ from the one that was drawn

export function listen(map) {
  const { canvas } = map;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const fingers = new Map();
  let start = null; // where the first finger came down, and what became of it
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    map.hover(null);
    fingers.set(event.pointerId, place(event));
    if (fingers.size > 1) {
      // Two fingers zoom, whichever tool is chosen; nothing else comes of them.
      start.several = true;
      map.outline = null;
      map.drawOver();
      return;
    }
    start = { at: place(event), moved: false, several: false };
    if (map.tool === "lasso") map.outline = [map.camera.toPlane(...place(event))];
    if (map.tool === "decode") map.moveCross(place(event));
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = place(event), before = fingers.get(event.pointerId);
    if (!before) {
      map.hover(now);
      return;
    }
    if (fingers.size === 2) {
      const middle = () => [0, 1].map((k) => [...fingers.values()].reduce((sum, at) => sum + at[k], 0) / 2);
      const apart = () => Math.hypot(...[0, 1].map((k) => [...fingers.values()].reduce((gap, at) => at[k] - gap, 0)));
      const [from, old] = [middle(), apart()];
      fingers.set(event.pointerId, now);
      const to = middle();
      map.camera.pan(to[0] - from[0], to[1] - from[1]);
      if (old > 0) map.camera.zoom(apart() / old, ...to);
      map.moved();
      return;
    }
    fingers.set(event.pointerId, now);
    if (start.several) return;
    if (Math.hypot(now[0] - start.at[0], now[1] - start.at[1]) > STILL) start.moved = true;
    if (map.tool === "lasso") {
      map.outline.push(map.camera.toPlane(...now));
      map.drawOver();
    } else if (map.tool === "decode") map.moveCross(now);
    else if (start.moved) {
      map.camera.pan(now[0] - before[0], now[1] - before[1]);
      map.moved();
    }
  });
  const end = (event) => {
    if (!fingers.delete(event.pointerId) || fingers.size) return;
    const { outline } = map;
    map.outline = null;
    // The browser takes a finger away to scroll the page.
    if (start.several || event.type === "pointercancel") map.drawOver();
    else if (outline) {
      if (outline.length > 2) map.lasso(simplified(outline, map.camera));
      else map.clearSelection();
    } else if (map.tool === "move" && !start.moved) {
      const point = map.near(place(event));
      if (point >= 0) map.pin(point, event.shiftKey);
    }
  };
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
  canvas.addEventListener("pointerleave", () => map.hover(null));
  canvas.addEventListener("wheel", (event) => {
    // The wheel scrolls the page, unless the map has been chosen.
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) {
      map.say("Click the map, or hold Ctrl, to zoom with the wheel.");
      return;
    }
    event.preventDefault();
    map.camera.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), ...place(event));
    map.moved();
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => {
    map.camera.zoom(2, ...place(event));
    map.moved();
  });
  canvas.addEventListener("keydown", (event) => key(map, event));
}

function key(map, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const steps = { ArrowLeft: [1, 0], ArrowRight: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  const move = steps[event.key];
  const act = {
    "+": () => map.zoomBy(1.5), "=": () => map.zoomBy(1.5), "-": () => map.zoomBy(1 / 1.5),
    0: () => { map.camera.reset(); map.moved(); },
    n: () => map.step(1), p: () => map.step(-1), s: () => map.selectShown(),
    m: () => map.useTool("move"), l: () => map.useTool("lasso"),
    d: () => { map.useTool("decode"); map.moveCross([map.camera.width / 2, map.camera.height / 2]); },
    Escape: () => map.clearSelection(),
  }[event.key];
  if (move) {
    if (map.tool === "decode" && map.cross) {
      const at = map.camera.toPixel(...map.cross);
      map.moveCross([at[0] - 6 * move[0], at[1] - 6 * move[1]]);
    } else {
      map.camera.pan(40 * move[0], 40 * move[1]);
      map.moved();
    }
  } else if (act) act();
  else return;
  event.preventDefault();
}

// A polygon with fewer corners, whose outline moves by at most KEPT pixels (Douglas and Peucker).
export function simplified(polygon, camera) {
  const pixels = polygon.map((corner) => camera.toPixel(...corner));
  const kept = new Uint8Array(polygon.length);
  kept[0] = kept[polygon.length - 1] = 1;
  const parts = [[0, polygon.length - 1]];
  while (parts.length) {
    const [a, b] = parts.pop();
    let most = KEPT, found = -1;
    for (let i = a + 1; i < b; i++) {
      const far = distance(pixels[i], pixels[a], pixels[b]);
      if (far > most) [most, found] = [far, i];
    }
    if (found < 0) continue;
    kept[found] = 1;
    parts.push([a, found], [found, b]);
  }
  return polygon.filter((_, i) => kept[i]);
}

// The distance of a point from the line between two others.
function distance([x, y], [ax, ay], [bx, by]) {
  const dx = bx - ax, dy = by - ay, length = dx * dx + dy * dy;
  const t = length ? Math.max(0, Math.min(1, ((x - ax) * dx + (y - ay) * dy) / length)) : 0;
  return Math.hypot(x - ax - t * dx, y - ay - t * dy);
}
