// Reads the document, or asks the server for it, and shows the page.
import { clear, h } from "./dom.js";
import { revive } from "./data.js";
import { isLive } from "./live.js";
import { Page } from "./page.js";
import { follow } from "./follow.js";

async function start() {
  const root = document.getElementById("page");
  try {
    if (isLive()) {
      window.aevb = await follow(root);
      return;
    }
    const element = document.getElementById("data");
    const text = element.textContent;
    element.remove();
    window.aevb = new Page(await revive(JSON.parse(text)));
  } catch (error) {
    console.error(error);
    clear(root).append(h("p", { class: "bad" }, `The page cannot be shown: ${error.message}`));
    root.dataset.ready = "failed";
  }
}

start();
