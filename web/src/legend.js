// What the colours of the map mean, beside the map and in its saved picture.
import { h, clear, css } from "./dom.js";
import { valueAt } from "./data.js";
import { classColour, colourNumber, DISTINCT, rgb, scaleColour, unknownColour } from "./colours.js";

export function drawLegend(map) {
  const { legend, colour } = map;
  clear(legend);
  if (!colour) return;
  legend.setAttribute("aria-label", `Colours: ${colour.name}`);
  legend.append(h("strong", {}, colour.name));
  if (colour.kind === "class") {
    legend.append(...classes(colour).map(({ text, paint, level, count, hollow }) => {
      const dot = h("span", { class: hollow ? "dot hollow" : "dot" });
      dot.style.setProperty(hollow ? "border-color" : "background", paint);
      return h("button", { type: "button", class: "chip", title: `Select the ${count} rows`, on: { click: () => map.selectLevel(level) } },
        dot, `${text} (${count.toLocaleString("en")})`);
    }), colour.levels.length > DISTINCT ? h("span", { class: "quiet" },
      `The colours of more than ${DISTINCT} classes repeat almost: the panel of a row names its class.`) : "");
    return;
  }
  const bar = h("span", { class: "scale" });
  bar.style.setProperty("background", `linear-gradient(to right, ${stops().join(", ")})`);
  const missing = hasMissing(colour);
  legend.append(h("span", {}, `≤ ${colourNumber(colour, colour.from, 4)}`), bar,
    h("span", {}, `≥ ${colourNumber(colour, colour.to, 4)}`),
    colour.note || missing ? h("span", { class: "quiet" }, [colour.note, missing ? "grey ring: no value" : ""].filter(Boolean).join("; ")) : "",
    extremes(map, "Lowest", 1), extremes(map, "Highest", -1));
}

const stops = () => Array.from({ length: 9 }, (_, k) => rgb(scaleColour(k / 8)));

function hasMissing({ low, values: { array } }) {
  return low === undefined ? array.some(Number.isNaN) : array.includes(65535);
}

function classes({ levels, values }) {
  const counts = new Array(levels.length + 1).fill(0);
  for (const code of values.array) counts[code]++;
  const found = levels.map((text, level) => ({ text, level, paint: rgb(classColour(level)), count: counts[level] }));
  if (counts.at(-1)) found.push({ text: "unknown", level: levels.length, paint: rgb(unknownColour()), count: counts.at(-1), hollow: true });
  return found;
}

// The rows with the smallest or largest numbers, as buttons.
function extremes(map, text, sign) {
  const { colour } = map, worst = [];
  for (let row = 0; row < colour.values.array.length; row++) {
    const value = valueAt(colour, row);
    if (Number.isNaN(value)) continue;
    const key = sign * value;
    if (worst.length < 3 || key < worst.at(-1)[0]) {
      worst.push([key, row]);
      worst.sort((a, b) => a[0] - b[0]);
      worst.length = Math.min(worst.length, 3);
    }
  }
  return h("span", { class: "buttons" }, `${text}: `, worst.map(([, row]) => h("button", { type: "button", class: "tiny", on: {
    click: () => map.pinRow(row),
  } }, `${map.contents.name(row)} (${colourNumber(colour, valueAt(colour, row), 4)})`)));
}

// The map as a picture, with the titles of its axes and the key of its colours.
export function snapshot(map) {
  const { ratio, canvas, colour, view } = map, size = 12 * ratio, line = 1.6 * size, margin = size;
  const words = colour ? (colour.kind === "class" ? classes(colour) : scaleWords(colour)) : [];
  const probe = h("canvas", {}).getContext("2d"), font = `${size}px system-ui, sans-serif`;
  probe.font = font;
  let x = margin, y = canvas.height + line;
  const placed = [...(colour ? [{ text: colour.name }] : []), ...words].map((word) => {
    const wide = (word.paint ? size : 0) + (word.bar ? 10 * size : probe.measureText(word.text).width) + size;
    if (x + wide > canvas.width && x > margin) [x, y] = [margin, y + line];
    const at = { ...word, x, y };
    x += wide;
    return at;
  });
  const copy = h("canvas", { width: canvas.width, height: colour ? Math.ceil(y + line) : canvas.height });
  const context = copy.getContext("2d");
  context.fillStyle = css("--paper");
  context.fillRect(0, 0, copy.width, copy.height);
  context.drawImage(canvas, 0, 0);
  context.font = font;
  context.fillStyle = css("--quiet");
  context.textAlign = "center";
  if (view.x) context.fillText(view.x, canvas.width / 2, canvas.height - 8 * ratio);
  context.save();
  context.translate(size, canvas.height / 2);
  context.rotate(-Math.PI / 2);
  if (view.y) context.fillText(view.y, 0, 0);
  context.restore();
  context.textAlign = "left";
  for (const word of placed) {
    if (word.bar) {
      const scale = context.createLinearGradient(word.x, 0, word.x + 10 * size, 0);
      stops().forEach((paint, k, all) => scale.addColorStop(k / (all.length - 1), paint));
      context.fillStyle = scale;
      context.fillRect(word.x, word.y - size, 10 * size, size);
      continue;
    }
    if (word.paint) {
      context.beginPath();
      context.arc(word.x + size / 3, word.y - size / 3, size / 3, 0, 7);
      context.fillStyle = context.strokeStyle = word.paint;
      if (word.hollow) context.stroke();
      else context.fill();
    }
    context.fillStyle = css("--ink");
    context.fillText(word.text, word.x + (word.paint ? size : 0), word.y);
  }
  return copy;
}

const scaleWords = (colour) => [
  { text: `≤ ${colourNumber(colour, colour.from, 4)}` }, { bar: true }, { text: `≥ ${colourNumber(colour, colour.to, 4)}` },
  ...(hasMissing(colour) ? [{ text: "no value", paint: rgb(unknownColour()), hollow: true }] : []),
];
