// Selections by a text, and those that the address names; and the points of the map as a table.
import { valueAt } from "./data.js";
import { colourText } from "./colours.js";

// Select the rows with this number, or with this text in their cells.
export function search(map, text, { pin = true } = {}) {
  if (!text) {
    map.clearSelection();
    return;
  }
  const rows = new Set(), { numbers, count } = map.map.rows, { contents } = map;
  if (/^\d+$/.test(text)) {
    for (let i = 0; i < count; i++) if ((numbers ? numbers.array[i] : i) === Number(text)) rows.add(i);
  }
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
    message: rows.size ? "" : `No row matches “${text}”. Search for a row's number, or for a text in its cells. ${note}` });
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
