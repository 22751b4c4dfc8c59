// Building the page: elements from names, attributes and children. Texts are always text nodes.

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    } else if (name === "dataset") {
      Object.assign(element.dataset, value);
    } else if (name === "value" || name === "checked" || name === "disabled") {
      element[name] = value;
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) add(element, child);
    else element.append(child instanceof Node ? child : String(child));
  }
}

export const h = (tag, attributes, ...children) =>
  build(document.createElement(tag), attributes, children);

export const s = (tag, attributes, ...children) =>
  build(document.createElementNS(SVG, tag), attributes, children);

// Markup that the library made itself: formulas and diagrams.
export function svg(markup) {
  const parsed = new DOMParser().parseFromString(markup, "text/html");
  const box = h("span", { class: "drawn" });
  box.append(...parsed.body.childNodes);
  return box;
}

export function clear(element) {
  element.replaceChildren();
  return element;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0"; // −0 too
  const size = Math.abs(value);
  let text;
  if (Number.isInteger(value) && size < 1e15) text = value.toLocaleString("en");
  else if (size !== 0 && (size >= 1e7 || size < 1e-4)) text = value.toExponential(digits - 1);
  else text = Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 8 });
  return text.replaceAll("-", "−");
}

export const plural = (count, word) =>
  `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export const select = (label, options, value, change) =>
  h("label", { class: "field" }, h("span", {}, label),
    h("select", { on: { change: (event) => change(event.target.value) } },
      options.map(([key, text]) =>
        h("option", { value: key, selected: String(key) === String(value) }, text))));

export function announce(text) {
  const place = document.getElementById("announcer");
  if (place) place.textContent = text;
}
