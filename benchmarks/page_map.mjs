// Three ways to draw the points of a map: the renderer of pages (web/src/scatter.js, the processor
// fills an image), regl-scatterplot (WebGL), and plain WebGL points. Chromium has no graphics card
// here, so WebGL runs in software (SwiftShader), as on a virtual machine or a remote desktop.
//
// It needs three packages that are no dependencies of the project:
//
//   mkdir /tmp/page_map && cd /tmp/page_map
//   npm install regl-scatterplot@1.16 playwright-core esbuild
//   node …/benchmarks/page_map.mjs --modules /tmp/page_map/node_modules [--points N …]
//
// "First" is the time from the data in memory to the first picture, "pan" the median of nine
// redraws after two that do not count. Each time ends with a pixel that is read back. A point is two
// pixels wide, with an opacity of 0.4. (A page draws a million points one pixel wide.)
// regl-scatterplot draws at the next frame, so that its times contain a wait of up to 17 ms.
// --pictures FOLDER saves what each renderer drew.
import { createRequire } from "node:module";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { cpus, loadavg, tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const option = (name, otherwise) => {
  const at = process.argv.indexOf(`--${name}`);
  if (at < 0) return otherwise;
  const rest = process.argv.slice(at + 1), end = rest.findIndex((text) => text.startsWith("--"));
  return end < 0 ? rest : rest.slice(0, end);
};
const [modules] = option("modules", [join(process.cwd(), "node_modules")]);
const [chromium] = option("chromium", ["/usr/bin/chromium"]);
const [pictures] = option("pictures", [null]);
const counts = option("points", ["10000", "100000", "1000000"]).map(Number);
const require = createRequire(join(resolve(modules), "unused.js"));
const { build } = require("esbuild");
const playwright = require("playwright-core");

// What runs in the browser ---------------------------------------------------------------------

// Ten normal clusters on a circle, in 16-bit numbers.
const DATA = `
  const WIDTH = 900, HEIGHT = 600;
  const PALETTE = [[0, 114, 178], [230, 159, 0], [0, 158, 115], [204, 121, 167], [86, 180, 233],
    [213, 94, 0], [140, 122, 0], [127, 60, 141], [77, 77, 77], [165, 170, 153]];
  const count = Number(new URLSearchParams(location.search).get("n"));
  let state = 2463534242;
  const uniform = () => {
    state ^= state << 13; state ^= state >>> 17; state ^= state << 5;
    return (state >>> 0) / 2 ** 32;
  };
  const across = new Uint16Array(count), up = new Uint16Array(count), group = new Uint8Array(count);
  for (let i = 0; i < count; i++) {
    const k = i % 10, angle = (2 * Math.PI * k) / 10, turn = 2 * Math.PI * uniform();
    const far = 2500 * Math.sqrt(-2 * Math.log(1 - uniform()));
    group[i] = k;
    across[i] = 32768 + 15000 * Math.cos(angle) + far * Math.cos(turn);
    up[i] = 32768 + 15000 * Math.sin(angle) + far * Math.sin(turn);
  }
  const canvas = document.querySelector("canvas");
  const measured = async (start) => {
    const began = performance.now();
    const redraw = await start();
    const first = performance.now() - began, times = [];
    for (let i = 0; i < 11; i++) {
      const from = performance.now();
      await redraw(i);
      if (i > 1) times.push(performance.now() - from);
    }
    return { first, pan: times.sort((a, b) => a - b)[4] };
  };
`;

const OWN = `
  import { Points, Camera, paint } from ${JSON.stringify(resolve(here, "../web/src/scatter.js"))};
  ${DATA}
  window.measure = () => measured(async () => {
    const context = canvas.getContext("2d");
    const image = context.createImageData(WIDTH, HEIGHT);
    const points = new Points(across, up), camera = new Camera();
    camera.fit(WIDTH, HEIGHT, 1);
    const palette = Uint32Array.from(PALETTE, ([r, g, b]) => (0xff000000 | (b << 16) | (g << 8) | r) >>> 0);
    const draw = () => {
      paint(image, points, camera, 1, { index: group, palette, mask: null, paper: 0xffffffff, size: 2, alpha: 0.4 });
      context.putImageData(image, 0, 0);
      context.getImageData(0, 0, 1, 1);
    };
    draw();
    return (i) => { camera.pan(i % 2 ? 9 : -9, 3); draw(); };
  });
`;

const REGL = `
  import createScatterplot from "regl-scatterplot";
  ${DATA}
  const x = Float32Array.from(across, (v) => v / 32768 - 1), y = Float32Array.from(up, (v) => v / 32768 - 1);
  const z = Float32Array.from(group);
  window.measure = () => measured(async () => {
    const hex = (colour) => "#" + colour.map((v) => v.toString(16).padStart(2, "0")).join("");
    const plot = createScatterplot({ canvas, width: WIDTH, height: HEIGHT, pointSize: 2, opacity: 0.4,
      colorBy: "valueA", pointColor: PALETTE.map(hex) });
    const gl = plot.get("regl")._gl, pixel = new Uint8Array(4);
    const read = () => gl.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, pixel);
    await plot.draw({ x, y, z });
    read();
    return async (i) => {
      await plot.view(new Float32Array([1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, i * 0.01, 0, 0, 1]));
      await new Promise(requestAnimationFrame);
      read();
    };
  });
`;

const WEBGL = `
  ${DATA}
  const VERTEX = \`#version 300 es
    in vec2 place; in float group; uniform vec4 view; uniform vec3 palette[10]; flat out vec3 colour;
    void main() { gl_Position = vec4(place * view.xy + view.zw, 0.0, 1.0); gl_PointSize = 2.0; colour = palette[int(group)]; }\`;
  const FRAGMENT = \`#version 300 es
    precision mediump float; flat in vec3 colour; out vec4 shown;
    void main() { shown = vec4(colour * 0.4, 0.4); }\`;
  window.measure = () => measured(async () => {
    const gl = canvas.getContext("webgl2", { antialias: false });
    const program = gl.createProgram();
    for (const [kind, source] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, source);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    if (!gl.getProgramParameter(program, gl.LINK_STATUS)) throw new Error(gl.getProgramInfoLog(program));
    gl.useProgram(program);
    const attribute = (name, size, type, normalised, data) => {
      gl.bindBuffer(gl.ARRAY_BUFFER, gl.createBuffer());
      gl.bufferData(gl.ARRAY_BUFFER, data, gl.STATIC_DRAW);
      const at = gl.getAttribLocation(program, name);
      gl.enableVertexAttribArray(at);
      gl.vertexAttribPointer(at, size, type, normalised, 0, 0);
    };
    const places = new Uint16Array(2 * count);
    for (let i = 0; i < count; i++) { places[2 * i] = across[i]; places[2 * i + 1] = up[i]; }
    attribute("place", 2, gl.UNSIGNED_SHORT, true, places);
    attribute("group", 1, gl.UNSIGNED_BYTE, false, group);
    gl.uniform3fv(gl.getUniformLocation(program, "palette"), PALETTE.flat().map((v) => v / 255));
    const view = gl.getUniformLocation(program, "view"), pixel = new Uint8Array(4);
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
    gl.clearColor(1, 1, 1, 1);
    const draw = (shift) => {
      gl.clear(gl.COLOR_BUFFER_BIT);
      gl.uniform4f(view, (2 * HEIGHT) / WIDTH, 2, shift - HEIGHT / WIDTH, -1);
      gl.drawArrays(gl.POINTS, 0, count);
      gl.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, pixel);
    };
    draw(0);
    return (i) => draw(0.01 * (i + 1));
  });
`;

// Measuring --------------------------------------------------------------------------------------

const folder = mkdtempSync(join(tmpdir(), "page_map-"));
const browser = await playwright.chromium.launch({ executablePath: chromium, args: [
  "--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync",
  "--no-first-run", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
] });
try {
  console.log(`${cpus().length} cores, load ${loadavg()[0].toFixed(1)}\n`);
  console.log("| points | renderer | first picture, ms | pan, ms |\n|---:|---|---:|---:|");
  const renderers = [["web/src/scatter.js", OWN], ["regl-scatterplot", REGL], ["plain WebGL", WEBGL]];
  for (const [k, [, source]] of renderers.entries()) {
    const made = await build({ stdin: { contents: source, resolveDir: dirname(resolve(modules)) }, bundle: true,
      write: false, format: "iife", minify: true, nodePaths: [resolve(modules)] });
    const script = made.outputFiles[0].text.replaceAll("</script", "<\\/script");
    writeFileSync(join(folder, `${k}.html`),
      `<!doctype html><meta charset="utf-8"><canvas width="900" height="600" style="width:900px;height:600px"></canvas><script>${script}</script>`);
  }
  for (const n of counts) {
    for (const [k, [name]] of renderers.entries()) {
      const page = await browser.newPage({ viewport: { width: 1000, height: 700 } });
      page.on("pageerror", (error) => { throw error; });
      await page.goto(`${pathToFileURL(join(folder, `${k}.html`))}?n=${n}`);
      const { first, pan } = await page.evaluate(() => window.measure());
      console.log(`| ${n.toLocaleString("en")} | ${name} | ${first.toFixed(1)} | ${pan.toFixed(1)} |`);
      if (pictures) await page.screenshot({ path: join(pictures, `${k}-${n}.png`) });
      await page.close();
    }
  }
} finally {
  await browser.close();
  rmSync(folder, { recursive: true });
}
