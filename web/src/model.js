// The declaration, the graphs of p and q, the derived estimator, and the settings.
import { h, svg, number, plural } from "./dom.js";
import { pictureTools } from "./export.js";

export function modelPart(run) {
  const { model, settings, data, notes } = run.summary;
  const part = h("section", { class: "part", id: "model", "aria-labelledby": "model-title" },
    h("h2", { id: "model-title" }, "Model"));
  if (model) {
    part.append(h("div", { class: "panel" }, h("h3", {}, "Declaration"),
      model.factorisations.map((one) => h("p", { class: "formula-line" }, svg(one.html), " ",
        h("span", { class: "quiet" }, plural(one.parameters, "parameter")))),
      h("div", { class: "scroll" }, h("table", { class: "cells" },
        h("thead", {}, h("tr", {}, ["", "factor", "size", "parameters", "conditional"].map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, model.entries.map((one) => h("tr", {}, h("td", {}, one.side), h("th", { scope: "row" }, one.key),
          h("td", {}, String(one.size)), h("td", {}, number(one.parameters)), h("td", {}, h("code", {}, one.spec)))))))));
    part.append(h("div", { class: "diagrams" }, Object.entries(model.diagrams).map(([side, markup]) => {
      const drawn = svg(markup);
      const figure = h("figure", { class: "picture panel" }, drawn, h("figcaption", {}, side === "p"
        ? "p, the generative model: observed variables are shaded." : "q, the approximate posterior."));
      pictureTools(figure, { name: `graph-${side}`, svg: () => drawn.querySelector("svg") });
      return figure;
    })));
    part.append(h("div", { class: "panel" }, h("h3", {}, "The derived estimator"),
      h("p", { class: "formula-line" }, svg(model.estimator.html)),
      h("div", { class: "scroll" }, h("table", { class: "cells why" },
        h("thead", {}, h("tr", {}, ["latent", "its expectation", "its term"].map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, model.latents.map((one) => h("tr", {}, h("th", { scope: "row" }, one.name),
          h("td", {}, h("strong", {}, one.draw), `: ${one.why_draw}`), h("td", {}, h("strong", {}, one.term), `: ${one.why_term}`)))))),
      h("details", {}, h("summary", {}, "As text and LaTeX"), h("pre", {}, model.estimator.text), h("pre", {}, model.estimator.latex))));
  }
  if (settings?.length || data?.length || notes?.length) part.append(settingsPanel(settings ?? [], data ?? [], notes ?? []));
  return part;
}

function settingsPanel(settings, data, notes) {
  const rows = (list) => list.map((one) => h("tr", { class: one.usual ? "quiet" : null, title: one.help },
    h("th", { scope: "row" }, one.name), h("td", {}, one.value)));
  const [usual, changed] = [settings.filter((one) => one.usual), settings.filter((one) => !one.usual)];
  return h("div", { class: "panel", id: "settings" }, h("h3", {}, "Data and settings"),
    h("table", { class: "cells" }, h("tbody", {}, data.map(([name, text]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, text))), rows(changed))),
    usual.length ? h("details", {}, h("summary", {}, `${usual.length} settings at their defaults`), h("table", { class: "cells" }, h("tbody", {}, rows(usual)))) : null,
    notes.length ? h("details", {}, h("summary", {}, "Notes on the data"), h("pre", {}, notes.join("\n"))) : null);
}
