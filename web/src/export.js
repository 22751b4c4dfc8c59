// Saving pictures and their data.
import { h } from "./dom.js";

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
  // A text that a spreadsheet would run as a formula is marked as text.
  const safe = typeof cell === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
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
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", Math.round(box.width));
  copy.setAttribute("height", Math.round(box.height));
  return new XMLSerializer().serializeToString(copy);
}

// Small buttons below a picture. `png` and `svg` return a canvas and an <svg>, `csv` returns
// {columns, rows}.
export function pictureTools(figure, { name, png, svg, csv }) {
  const button = (label, title, act) =>
    h("button", { class: "tiny", type: "button", title, "aria-label": title, on: { click: act } }, label);
  const tools = h("div", { class: "tools" },
    png && button("PNG", `Save ${name} as PNG`, () =>
      png().toBlob((blob) => save(`${name}.png`, "image/png", blob))),
    svg && button("SVG", `Save ${name} as SVG`, () =>
      save(`${name}.svg`, "image/svg+xml", standaloneSvg(svg()))),
    csv && button("CSV", `Save the data of ${name} as CSV`, () => {
      const { columns, rows } = csv();
      save(`${name}.csv`, "text/csv", toCsv(columns, rows));
    }));
  figure.append(tools);
  return tools;
}
