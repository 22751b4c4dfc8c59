// Selections by a text, and those that the address names; and the points of the map as a table.
import { valueAt } from "./data.js";
import { colourText } from "./colours.js";

// {split, number} of a text such as "row 8" or "test row 8"; null for others. `split` is a number.
export function rowNamed(text, splits) {
  const found = /^(?:(.*\S)\s+)?row\s+(\d+)$/i.exec(text);
  if (!found) return null;
  const split = found[1] === undefined ? null : splits.findIndex((one) => one.toLowerCase() === found[1].toLowerCase());
  return split === -1 ? null : { split, number: Number(found[2]) };
}

// {name, value} of a text such as "label 8" or "label = 8", for the longest of the names; or null.
export function cellNamed(text, names) {
  let best = null;
  for (const name of names) {
    if (!text.toLowerCase().startsWith(name.toLowerCase()) || name.length <= (best?.name.length ?? 0)) continue;
    const rest = /^\s*(?:[=:]|\s)\s*(\S.*)$/.exec(text.slice(name.length));
    if (rest) best = { name, value: rest[1].trim() };
  }
  return best;
}

// A test of rows: whether a colour or a column has this value in them; null if it never can.
function has(map, name, value) {
  const { contents } = map, typed = Number(value.replaceAll("−", "-")), low = value.toLowerCase();
  const levels = (texts, code) => {
    const same = new Set(texts.flatMap((text, k) => (text.toLowerCase() === low ? [k] : [])));
    return (row) => same.has(code(row));
  };
  const column = contents.contents.kind === "cells" && contents.contents.columns.find((one) => one.name === name);
  const place = (row) => contents.place(row);
  if (column?.levels) return levels(column.levels, (row) => (place(row) < 0 ? -1 : column.codes.array[place(row)]));
  if (column) return (row) => place(row) >= 0 && valueAt(column.numbers, place(row)) === typed;
  const colour = map.map.colours.find((one) => one.name === name);
  if (colour.kind === "class") return levels(colour.levels, (row) => colour.values.array[row]);
  const step = colour.low === undefined ? 0 : (colour.high - colour.low) / 65534;
  return (row) => {
    const found = valueAt(colour, row);
    return found === typed || found === Math.fround(typed) || Math.abs(found - typed) <= step / 2
      || colourText(colour, row) === value.replaceAll("-", "−");
  };
}

// Select the rows with this number or name ("test row 8"), with this value ("label = 8"), or with
// this text in their cells.
export function search(map, text, { pin = true } = {}) {
  if (!text) {
    map.clearSelection();
    return;
  }
  const rows = new Set(), { splits, split, numbers, count } = map.map.rows, { contents } = map;
  const named = /^\d+$/.test(text) ? { split: null, number: Number(text) } : rowNamed(text, splits);
  for (let i = 0; named && i < count; i++) {
    if ((numbers ? numbers.array[i] : i) === named.number && (named.split === null || (split ? split.array[i] : 0) === named.split)) rows.add(i);
  }
  const names = [...map.map.colours, ...(contents.contents.kind === "cells" ? contents.contents.columns : [])].map((one) => one.name);
  const cell = cellNamed(text, names), fits = cell && has(map, cell.name, cell.value);
  for (let i = 0; fits && i < count; i++) if (fits(i)) rows.add(i);
  const low = text.toLowerCase(), typed = text.replaceAll("−", "-");
  for (const column of contents.contents.kind === "cells" ? contents.contents.columns : []) {
    const hits = new Set((column.levels ?? []).flatMap((level, k) => (level.toLowerCase().includes(low) ? [k] : [])));
    if (column.levels && !hits.size) continue;
    for (let i = 0; i < count; i++) {
      const place = contents.place(i);
      if (place >= 0 && (column.levels ? hits.has(column.codes.array[place]) : String(valueAt(column.numbers, place)) === typed)) rows.add(i);
    }
  }
  const note = contents.contents.kind === "cells" && contents.contents.detail
    ? `Only the cells of ${contents.contents.count.toLocaleString("en")} rows were searched: the page holds no others.` : "";
  map.selectRows(rows, `“${text}”`, { key: { select: `find:${text}` }, note,
    message: rows.size ? "" : `No row matches “${text}”. Search for a row's number, for a value such as “${names[0] ?? "label"} = 3”, or for a text in its cells. ${note}`,
    own: cell?.name ?? null });
  if (!rows.size) map.say(`No row matches “${text}”.`);
  let first = Infinity;
  for (const row of rows) first = Math.min(first, row);
  if (pin && rows.size) map.pinRow(first);
}

// The selection that the address names.
export function restoreSelection(map) {
  const { state } = map.context, corners = state.numbers("lasso"), wanted = state.get("select", "");
  if (corners && corners.length >= 6) {
    const polygon = Array.from({ length: Math.floor(corners.length / 2) }, (_, i) => [corners[2 * i], corners[2 * i + 1]]);
    map.lasso(polygon, "lasso", state.get("in") ?? map.viewName());
  } else if (wanted.startsWith("find:")) search(map, wanted.slice(5), { pin: false });
  else if (wanted.startsWith("class:")) {
    const end = wanted.lastIndexOf(":"), level = Number(wanted.slice(end + 1));
    const colour = map.map.colours.find((one) => one.kind === "class" && one.name === wanted.slice(6, end));
    if (!colour || !Number.isInteger(level)) return;
    const shown = map.colour;
    map.colour = colour;
    map.selectLevel(level);
    map.colour = shown;
  }
}

// All points of the map, or those of a selection, as {columns, rows} of a file.
export function csvOf(map, only = null) {
  const { splits, split } = map.map.rows, { step } = map.space;
  const cells = new Map((map.contents.contents.columns ?? []).map((column) => [column.name, column]));
  // The map rounds numbers for their colours; the cells have them as they are.
  const value = (colour, row) => {
    const cell = cells.get(colour.name), place = map.contents.place(row);
    if (cell?.numbers && place >= 0) return valueAt(cell.numbers, place);
    if (colour.date) return Number.isNaN(valueAt(colour, row)) ? "" : colourText(colour, row);
    return colour.kind === "class" ? colour.levels[colour.values.array[row]] ?? "" : valueAt(colour, row);
  };
  // The split is the first column already. A table may have a column of that name, too.
  const own = split ? map.map.colours.findIndex((c) => c.name === "split") : -1;
  const colours = map.map.colours.filter((_, k) => k !== own);
  const columns = ["split", "row", ...(step ? ["step"] : []), map.view.x || "x", map.view.y || "y", ...colours.map((c) => c.name)];
  function* lines() {
    for (let i = 0; i < map.points.count; i++) {
      if (only && !only.mask[i]) continue;
      const row = map.rowOf(i);
      yield [splits[split ? split.array[row] : 0], map.map.rows.numbers?.array[row] ?? row, ...(step ? [step.array[i]] : []),
        valueAt(map.view.across, i), valueAt(map.view.up, i), ...colours.map((c) => value(c, row))];
    }
  }
  return { columns, rows: [...lines()] };
}
