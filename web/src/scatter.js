// A scatter plot of up to millions of points, drawn by the processor into an image.
//
// Points are pairs of 16-bit numbers. A loop over a million of them takes some 30 ms on one core,
// wherever the page is opened (the first two loops take longer, until the browser has compiled
// them); WebGL without a graphics card takes ten times as long. benchmarks/page_map.mjs compares
// both.

export class Points {
  // across, up: Uint16Array of quantised coordinates.
  constructor(across, up) {
    this.across = across;
    this.up = up;
    this.count = across.length;
    this.index = null;
  }

  // Positions of the points sorted by the cells of a grid, for searching near a place.
  grid() {
    if (this.index) return this.index;
    const side = Math.max(1, Math.min(512, Math.ceil(Math.sqrt(this.count / 4))));
    const width = 65536 / side;
    const starts = new Uint32Array(side * side + 1);
    const cell = new Uint32Array(this.count);
    for (let i = 0; i < this.count; i++) {
      const c = Math.floor(this.up[i] / width) * side + Math.floor(this.across[i] / width);
      cell[i] = c;
      starts[c + 1]++;
    }
    for (let c = 0; c < side * side; c++) starts[c + 1] += starts[c];
    const next = starts.slice(0, -1);
    const order = new Uint32Array(this.count);
    for (let i = 0; i < this.count; i++) order[next[cell[i]]++] = i;
    this.index = { side, width, starts, order };
    return this.index;
  }

  // The point nearest to (x, y) within an ellipse of these radii, or −1.
  nearest(x, y, reachX, reachY) {
    const { side, width, starts, order } = this.grid();
    const cut = (value) => Math.max(0, Math.min(side - 1, Math.floor(value / width)));
    let found = -1, least = 1;
    for (let row = cut(y - reachY); row <= cut(y + reachY); row++) {
      for (let column = cut(x - reachX); column <= cut(x + reachX); column++) {
        const c = row * side + column;
        for (let k = starts[c]; k < starts[c + 1]; k++) {
          const i = order[k];
          const dx = (this.across[i] - x) / reachX, dy = (this.up[i] - y) / reachY;
          const distance = dx * dx + dy * dy;
          if (distance < least) {
            least = distance;
            found = i;
          }
        }
      }
    }
    return found;
  }

  // A mask of the points inside a polygon [[x, y], …] (even–odd rule), and their number. Each
  // band of the polygon lists the few edges that cross it, so a point is compared with those only.
  inside(polygon) {
    const mask = new Uint8Array(this.count);
    if (polygon.length < 3) return { mask, count: 0 };
    const xs = polygon.map((corner) => corner[0]), ys = polygon.map((corner) => corner[1]);
    const left = Math.min(...xs), right = Math.max(...xs);
    const low = Math.min(...ys), high = Math.max(...ys);
    const bands = 256, tall = (high - low) / bands || 1;
    const crossing = Array.from({ length: bands }, () => []);
    const band = (y) => Math.max(0, Math.min(bands - 1, Math.floor((y - low) / tall)));
    polygon.forEach((corner, i) => {
      const other = polygon[(i + polygon.length - 1) % polygon.length];
      const from = band(Math.min(corner[1], other[1])), to = band(Math.max(corner[1], other[1]));
      for (let b = from; b <= to; b++) crossing[b].push(corner[0], corner[1], other[0], other[1]);
    });
    let count = 0;
    for (let i = 0; i < this.count; i++) {
      const x = this.across[i], y = this.up[i];
      if (x < left || x > right || y < low || y > high) continue;
      const edges = crossing[band(y)];
      let odd = false;
      for (let e = 0; e < edges.length; e += 4) {
        const yi = edges[e + 1], yj = edges[e + 3];
        if (yi > y !== yj > y &&
            x < ((edges[e + 2] - edges[e]) * (y - yi)) / (yj - yi) + edges[e]) odd = !odd;
      }
      if (odd) {
        mask[i] = 1;
        count++;
      }
    }
    return { mask, count };
  }
}

// Where the plane of 16-bit numbers lies in the picture: pixel = offset + scale · number.
export class Camera {
  constructor() {
    Object.assign(this, { x: 32768, y: 32768, scale: 0, base: 1, aspect: 1 });
  }

  // `aspect` is the ratio of one step up to one step across, in the units of the plane.
  fit(width, height, aspect) {
    this.width = width;
    this.height = height;
    this.aspect = aspect;
    this.base = Math.min(width / 65536, height / (65536 * aspect)) * 0.92;
    if (!this.scale) this.scale = this.base;
  }

  reset() {
    Object.assign(this, { x: 32768, y: 32768, scale: this.base });
  }

  toPixel(x, y) {
    return [
      this.width / 2 + (x - this.x) * this.scale,
      this.height / 2 - (y - this.y) * this.scale * this.aspect,
    ];
  }

  toPlane(px, py) {
    return [
      this.x + (px - this.width / 2) / this.scale,
      this.y - (py - this.height / 2) / (this.scale * this.aspect),
    ];
  }

  pan(dx, dy) {
    this.x -= dx / this.scale;
    this.y += dy / (this.scale * this.aspect);
  }

  zoom(factor, px, py) {
    const [x, y] = this.toPlane(px, py);
    this.scale = Math.max(this.base / 2, Math.min(this.base * 4000, this.scale * factor));
    const [nx, ny] = this.toPlane(px, py);
    this.x += x - nx;
    this.y += y - ny;
  }
}

// Colour every point: `index[i]` is its place in `palette` (colours as 0xAABBGGRR).
// Points of the place `hollow` are rings.
export function paint(image, points, camera, ratio, { index, palette, hollow = -1, mask, paper, size, alpha }) {
  const pixels = new Uint32Array(image.data.buffer);
  const width = image.width, height = image.height;
  pixels.fill(paper);
  const sx = camera.scale * ratio, sy = -camera.scale * camera.aspect * ratio;
  const ox = width / 2 - camera.x * sx - size / 2, oy = height / 2 - camera.y * sy - size / 2;
  const { across, up, count } = points;
  const full = disc(size, width), ring = size < 4 ? full : disc(size, width, true);
  const draw = (wanted, strength) => {
    const a = Math.round(strength * 256), b = 256 - a;
    for (let i = 0; i < count; i++) {
      if (mask && mask[i] !== wanted) continue;
      const x = (across[i] * sx + ox + 0.5) | 0, y = (up[i] * sy + oy + 0.5) | 0;
      if (x < 0 || y < 0 || x > width - size || y > height - size) continue;
      const place = index[i], colour = palette[place], stamp = place === hollow ? ring : full;
      const rb = (colour & 0xff00ff) * a, g = (colour & 0xff00) * a, start = y * width + x;
      for (let k = 0; k < stamp.length; k++) {
        const p = start + stamp[k], old = pixels[p];
        pixels[p] = 0xff000000 | ((((old & 0xff00ff) * b + rb) >>> 8) & 0xff00ff) |
          ((((old & 0xff00) * b + g) >>> 8) & 0xff00);
      }
    }
  };
  if (mask) {
    draw(0, Math.min(alpha, 0.16));
    draw(1, Math.max(alpha, 0.8));
  } else draw(0, alpha);
  return pixels;
}

const discs = new Map();
function disc(size, width, hollow = false) {
  const key = `${size} ${width} ${hollow}`;
  if (!discs.has(key)) {
    const middle = (size - 1) / 2, found = [];
    for (let y = 0; y < size; y++) {
      for (let x = 0; x < size; x++) {
        const far = (x - middle) ** 2 + (y - middle) ** 2;
        if (size < 4 || (far <= (size / 2) ** 2 && !(hollow && far < (size / 2 - 1.5) ** 2))) found.push(y * width + x);
      }
    }
    if (discs.size > 50) discs.clear();
    discs.set(key, Int32Array.from(found));
  }
  return discs.get(key);
}

// The size of a point in pixels, and how opaque it is, by the number of points and the zoom.
export function pointStyle(count, camera, ratio) {
  const zoom = camera.scale / camera.base;
  const crowd = count / (zoom * zoom);
  const size = crowd > 300_000 ? 1 : crowd > 60_000 ? 2 : crowd > 8000 ? 3 : crowd > 1500 ? 5 : 7;
  return {
    size: Math.max(1, Math.round(size * ratio)),
    alpha: crowd > 300_000 ? 0.35 : crowd > 60_000 ? 0.45 : crowd > 8000 ? 0.6 : 0.8,
  };
}
