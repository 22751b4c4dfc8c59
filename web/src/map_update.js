// A new map of a run, from a later checkpoint or of all rows. Its part is made anew, because
// everything in it depends on the content; what the user has chosen is carried over.

/** Carry over the camera, the selection, the kept rows and the decoded point. Both parts are of the same run. */
export function carryOver(before, after) {
  carryForm(before.element, after.element);
  after.resize();
  carryCamera(before, after);
  const places = new Places(before, after);
  if (before.selection && before.selection.space === before.spaceIndex) {
    const { mask, count, what } = before.selection;
    const { found, n } = places.masked(mask, count);
    // The polygon was drawn around the rows of the earlier map, and the rows have moved: the address
    // keeps a class or a text, but no polygon.
    const select = after.context.state.get("select");
    after.select(found, n, what, { key: select ? { select } : {} });
  }
  const [pinned, other] = [before.pinned, before.other].map((point) => places.one(point));
  if (pinned >= 0) {
    after.pinned = pinned;
    if (other >= 0) after.other = other;
    after.inspect(pinned);
    after.showBetween();
  }
  after.tellRows();
  carryDecoded(before, after, pinned);
  after.cross ??= before.cross; // otherwise the tool would decode the centre
  if (before.tool !== "move") after.useTool(before.tool);
  after.moved();
}

// The same place and size in the units of the view, if it is the same view.
function carryCamera(before, after) {
  const { camera } = before, sides = [[camera.x, "across"], [camera.y, "up"]];
  const zoom = camera.scale / camera.base;
  const all = Math.abs(zoom - 1) < 1e-9 && camera.x === 32768 && camera.y === 32768;
  if (all || before.viewKey !== after.viewKey || before.view.title !== after.view.title) return;
  const span = (view, side) => view[side].high - view[side].low || 1;
  const [x, y] = sides.map(([at, side]) => {
    const value = before.view[side].low + (span(before.view, side) * at) / 65534;
    return ((value - after.view[side].low) / span(after.view, side)) * 65534;
  });
  const larger = span(after.view, "across") / span(before.view, "across");
  Object.assign(after.camera, { x, y, scale: after.camera.base * zoom * larger });
}

// The points of one map in another one. A row is known by its split and its number in it, because a
// map of a run that trains shows only some of the rows.
class Places {
  constructor(before, after) {
    Object.assign(this, { before, after });
    this.same = before.spaceIndex === after.spaceIndex && before.space.latent === after.space.latent;
  }

  static key(part, point) {
    const row = part.rowOf(point), { split, numbers } = part.map.rows;
    return `${split ? split.array[row] : 0} ${numbers ? numbers.array[row] : row} ${part.space.step?.array[point] ?? ""}`;
  }

  masked(mask, count) {
    const { before, after } = this, found = new Uint8Array(after.points.count);
    let n = 0;
    if (!this.same || !count) return { found, n };
    const wanted = new Set();
    for (let i = 0; i < mask.length; i++) if (mask[i]) wanted.add(Places.key(before, i));
    for (let i = 0; i < found.length; i++) {
      if (wanted.has(Places.key(after, i))) {
        found[i] = 1;
        n++;
      }
    }
    return { found, n };
  }

  one(point) {
    if (point < 0) return -1;
    const mask = new Uint8Array(this.before.points.count);
    mask[point] = 1;
    return this.masked(mask, 1).found.indexOf(1);
  }
}

// A row that is shown is decoded from its new code; values that were set by hand stay.
function carryDecoded(before, after, pinned) {
  const [old, now] = [before.explorer, after.explorer];
  if (!old || !now) return;
  Object.assign(now, { draw: old.draw, about: old.about });
  now.decoding.seed = old.decoding.seed;
  if (old.draw) now.buildControls();
  if (old.shownRow !== null) {
    if (pinned >= 0) after.decodeRow(pinned);
    return;
  }
  const { latents, given } = now.variables;
  const touched = latents.some(({ name }) => old.fixed.has(name));
  for (const { name, size } of [...latents, ...given]) {
    if (old.values[name]?.length !== size) continue;
    now.values[name] = old.values[name];
    if (old.fixed.has(name)) now.fixed.add(name);
    else now.fixed.delete(name);
  }
  now.latentsDrawn = old.latentsDrawn;
  now.origin.take(old.origin);
  carryForm(old.controls, now.controls);
  if (touched || old.found) now.update();
}

// Texts and choices of controls, and which details are open.
function carryForm(before, after) {
  for (const control of before.querySelectorAll("select, input:not([type=range])")) {
    const same = likeness(after, control);
    if (!same) continue;
    if (control.tagName === "SELECT" && ![...same.options].some((one) => one.value === control.value)) continue;
    if (control.tagName === "INPUT") same.checked = control.checked;
    same.value = control.value;
  }
  const [old, now] = [before, after].map((one) => [...one.querySelectorAll("details")]);
  if (old.length === now.length) now.forEach((one, i) => { one.open = old[i].open; });
}

const nameOf = (element) =>
  `${element.tagName} ${element.getAttribute("aria-label") ?? element.closest("label")?.firstElementChild?.textContent ?? element.textContent}`;

const likeness = (root, element) =>
  [...root.querySelectorAll(element.tagName)].find((one) => nameOf(one) === nameOf(element)) ?? null;

/** Replace elements of a root, and give the focus to the one that replaces the focused one. */
export function keepFocus(root, replace) {
  const focused = document.activeElement;
  const part = root.contains(focused) && focused.closest("section");
  replace();
  if (!part || focused.isConnected) return;
  const same = document.getElementById(part.id) && likeness(document.getElementById(part.id), focused);
  same?.focus({ preventScroll: true });
}
