// The clusters of a latent class: sizes, typical and doubtful members, draws.
import { h, number, plural } from "./dom.js";
import { valuesOf } from "./data.js";
import { imageCanvas, sequence } from "./rows.js";
import { classColour, rgb } from "./colours.js";
import { differences } from "./selection.js";
import { pictureOf, pictureTools } from "./export.js";

export function clustersPart(run, mapPart) {
  const { map } = run;
  if (!map?.clusters?.length) return null;
  return h("section", { class: "part", id: "clusters", "aria-labelledby": "clusters-title" },
    h("h2", { id: "clusters-title" }, "Clusters"), map.clusters.map((one) => latent(map, one, mapPart, isDead(run, one.latent))));
}

const isDead = (run, name) => (run.checks?.diagnosis?.findings ?? [])
  .some((one) => one.kind === "collapse" && one.about === name);

function latent(map, found, mapPart, dead) {
  const total = map.rows.count;
  const order = [...found.clusters].sort((a, b) => b.size - a.size);
  const labelled = order.some((one) => one.labels);
  const figure = h("figure", { class: "picture" },
    dead ? h("p", { class: "warn" }, h("strong", {}, `${found.latent} is dead: these groups carry no information.`)) : null,
    h("div", { class: "clusters" }, order.filter((one) => one.size).map((one) => card(map, found, one, total, mapPart, dead))),
    h("figcaption", {}, `${found.latent}: ${plural(found.count, "cluster")}${found.empty ? `, of which ${found.empty} have no row` : ""}` +
      `${found.count > order.length ? `; the ${order.length} largest are listed` : ""}. Typical members have the highest probability of their cluster, doubtful ones the lowest` +
      `${found.among < total ? `, among ${found.among.toLocaleString("en")} random rows whose contents the page holds` : ""}.` +
      `${found.undecided ? ` ${plural(found.undecided, "row")} without a finite posterior are in no cluster.` : ""}`));
  pictureTools(figure, { name: `clusters-${found.latent}`, png: () => pictureOf(figure), csv: () => ({
    columns: ["cluster", "rows", "mean certainty", ...(labelled ? ["labels"] : [])],
    rows: order.map((one) => [one.number, one.size, one.certainty, ...(labelled ? [(one.labels ?? []).map(([k, n]) => `${k}: ${n}`).join("; ")] : [])]),
  }) });
  return figure;
}

function card(map, found, one, total, mapPart, dead) {
  const { contents } = mapPart;
  const dot = h("span", { class: "dot" });
  dot.style.setProperty("background", rgb(classColour(one.number)));
  // Shares are of the labelled rows; one label of another class says nothing.
  const mixed = one.labels?.length > 1 && one.labels[1][1] > 1 ? one.labels[1][1] / one.labelled : 0;
  const share = (k) => `${number((100 * one.labels[k][1]) / one.labelled, 2)} %`;
  const tiles = (rows, text) => h("div", { class: "strip small" }, rows.map((row) => member(map, mapPart, row, text?.(row))));
  return h("article", { class: "panel cluster" },
    h("h3", {}, dot, ` ${found.latent} = ${one.number}`, h("span", { class: "quiet" }, ` ${plural(one.size, "row")}, ${number((100 * one.size) / total, 2)} %`)),
    h("p", {}, `Mean certainty ${number(one.certainty, 3)}. `,
      one.labels?.length ? `${number((100 * one.labels[0][1]) / one.labelled, 2)} % of ${one.labelled < one.size ? `its ${one.labelled.toLocaleString("en")} labelled rows` : "its rows"} have label ${one.labels[0][0]}; labels: ${one.labels.map(([k, n]) => `${k} (${n})`).join(", ")}. ` : "",
      mixed > 0.2 && !dead ? h("strong", { class: "warn" }, `Mixes labels ${one.labels[0][0]} and ${one.labels[1][0]} (${share(0)} / ${share(1)}). `) : null,
      h("button", { type: "button", class: "tiny", on: { click: () => {
        const colour = map.colours.find((c) => c.name === found.colour);
        if (colour) {
          mapPart.showColour(colour.name);
          mapPart.selectLevel(one.number);
        }
        mapPart.element.scrollIntoView();
      } } }, "show on the map")),
    contents.contents.kind === "cells" ? profile(mapPart, found, one) : null,
    h("h4", {}, "Typical"), tiles(one.typical),
    h("h4", {}, "Doubtful"), tiles(one.doubtful.map((d) => d.row), (row) => {
      const d = one.doubtful.find((other) => other.row === row);
      return `p ${number(d.p, 2)}, else ${d.other}`;
    }),
    found.draws ? [h("h4", {}, "Draws of p"), draws(found, one, contents)] : null);
}

// What distinguishes the rows of a cluster from the others.
function profile(mapPart, found, one) {
  const colour = mapPart.map.colours.find((c) => c.name === found.colour);
  if (!colour) return null;
  const rows = [];
  colour.values.array.forEach((k, row) => { if (k === one.number) rows.push(row); });
  const known = new Set(mapPart.contents.contents.columns.map((column) => column.name));
  const most = differences(mapPart, rows).filter(({ of }) => known.has(of)).slice(0, 5);
  return h("table", { class: "cells" }, h("thead", {}, h("tr", {}, ["", "here", "elsewhere"].map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, most.map(({ name, mine, theirs }) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, mine), h("td", {}, theirs)))));
}

function member(map, mapPart, row, text) {
  const { contents } = mapPart;
  const { kind } = contents.contents;
  const act = { click: () => {
    mapPart.pinRow(row);
    mapPart.element.scrollIntoView();
  } };
  const variable = contents.contents.variables?.[0];
  const picture = kind === "image" ? imageCanvas(contents.values(row, variable), variable.image, contents.name(row), variable.light)
    : kind === "sequence" ? sequence(variable, contents.values(row, variable), { size: 60, label: contents.name(row) })
      : h("span", {}, contents.name(row).replace(/^.*row /, "row "));
  return h("button", { type: "button", class: "tile", title: contents.summary(row), "aria-label": contents.summary(row), on: act },
    picture, text ? h("span", { class: "quiet" }, text) : null);
}

function draws(found, one, contents) {
  const { draws: drawn } = found, place = found.clusters.indexOf(one);
  if (drawn.cells) {
    const rows = drawn.cells.slice(place * drawn.each, (place + 1) * drawn.each).slice(0, 4);
    return h("div", { class: "scroll" }, h("table", { class: "cells" },
      h("thead", {}, h("tr", {}, drawn.columns.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, typeof cell === "number" ? number(cell) : cell ?? "–")))))));
  }
  const variable = contents.contents.variables.find((v) => v.name === drawn.variable);
  const size = drawn.shape.slice(2).reduce((a, b) => a * b, 1);
  return h("div", { class: "strip small" }, Array.from({ length: drawn.each }, (_, k) => {
    const values = valuesOf(drawn.numbers, (place * drawn.each + k) * size, size);
    return h("div", { class: "tile" }, variable.image ? imageCanvas(values, variable.image, `draw ${k + 1} of p for ${found.latent} = ${one.number}`, variable.light)
      : h("span", {}, [...values].slice(0, 4).map((v) => number(v, 3)).join(", ")));
  }));
}
