// Saving pictures and their data.
import { h, s, css } from "./dom.js";

export function save(name, type, content) {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const address = URL.createObjectURL(blob);
  const link = h("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

const quoted = (cell) => {
  if (cell === null || cell === undefined || Number.isNaN(cell)) return "";
  const text = String(cell);
  // A text that a spreadsheet would run as a formula is marked as text; a plain number is none.
  const plain = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text);
  const safe = typeof cell === "string" && !plain && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};

export const toCsv = (columns, rows) =>
  [columns, ...rows].map((row) => Array.from(row, quoted).join(",")).join("\n") + "\n";

const CARRIED = [
  "fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "fill-opacity",
  "stroke-opacity", "font-size", "font-family", "font-weight", "text-anchor", "dominant-baseline",
];

// The styles of a page reach only into the page, so a saved drawing carries its own.
export function standaloneSvg(drawing) {
  const copy = drawing.cloneNode(true);
  const sources = [drawing, ...drawing.querySelectorAll("*")];
  const targets = [copy, ...copy.querySelectorAll("*")];
  sources.forEach((source, i) => {
    const style = getComputedStyle(source);
    for (const name of CARRIED) targets[i].setAttribute(name, style.getPropertyValue(name));
  });
  const box = drawing.getBoundingClientRect();
  const [x, y, width, height] = (drawing.getAttribute("viewBox") ?? `0 0 ${box.width} ${box.height}`).split(/[ ,]+/);
  copy.prepend(s("rect", { x, y, width, height, fill: css("--paper") }));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", Math.round(box.width));
  copy.setAttribute("height", Math.round(box.height));
  return new XMLSerializer().serializeToString(copy);
}

// The canvases, drawings and short texts of an element as one canvas, laid out as on the page.
export async function pictureOf(element, texts = "p, span, strong, figcaption, caption, h3, h4, th, td, code") {
  const box = element.getBoundingClientRect(), ratio = 2, pad = 8;
  const canvas = h("canvas", {
    width: Math.max(1, Math.ceil((box.width + 2 * pad) * ratio)), height: Math.max(1, Math.ceil((box.height + 2 * pad) * ratio)),
  });
  const context = canvas.getContext("2d");
  context.fillStyle = css("--paper");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.scale(ratio, ratio);
  context.translate(pad - box.left, pad - box.top);
  for (const part of element.querySelectorAll(`canvas, svg, ${texts}`)) {
    const at = part.getBoundingClientRect();
    if (!at.width || !at.height) continue;
    if (part.tagName === "CANVAS") {
      context.imageSmoothingEnabled = false;
      context.drawImage(part, at.left, at.top, at.width, at.height);
    } else if (part.tagName.toLowerCase() === "svg") {
      const picture = new Image();
      picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standaloneSvg(part))}`;
      await picture.decode();
      context.drawImage(picture, at.left, at.top, at.width, at.height);
    } else for (const text of part.childNodes) if (text.nodeType === Node.TEXT_NODE) writeText(context, text);
  }
  return canvas;
}

// The words of a text where the page has them, line by line.
function writeText(context, text) {
  const style = getComputedStyle(text.parentElement), range = document.createRange();
  context.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  context.fillStyle = style.color;
  context.textBaseline = "middle";
  for (const { 0: word, index } of text.data.matchAll(/\S+/g)) {
    range.setStart(text, index);
    range.setEnd(text, index + word.length);
    const at = range.getBoundingClientRect();
    context.fillText(word, at.left, (at.top + at.bottom) / 2);
  }
}

// Small buttons below a picture. `png` and `svg` return a canvas (or a promise of it) and an <svg>,
// `csv` returns {columns, rows}; `what` says which data these are.
export function pictureTools(figure, { name, png, svg, csv, what = "" }) {
  const button = (label, title, act) =>
    h("button", { class: "tiny", type: "button", title, "aria-label": title, on: { click: act } }, label);
  const tools = h("div", { class: "tools" },
    png && button("PNG", `Save ${name} as PNG`, async () =>
      (await png()).toBlob((blob) => save(`${name}.png`, "image/png", blob))),
    svg && button("SVG", `Save ${name} as SVG`, () =>
      save(`${name}.svg`, "image/svg+xml", standaloneSvg(svg()))),
    csv && button("CSV", `Save the data of ${name} as CSV${what ? ` (${what})` : ""}`, () => {
      const { columns, rows } = csv();
      save(`${name}.csv`, "text/csv", toCsv(columns, rows));
    }));
  figure.append(tools);
  return tools;
}
