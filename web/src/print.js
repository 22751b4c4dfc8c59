// Paper is light: a page in the dark is painted anew for printing.
let shown = null;

export function printLight(map) {
  if (!shown) {
    let theme = null;
    addEventListener("beforeprint", () => {
      theme = document.documentElement.dataset.theme ?? null;
      document.documentElement.dataset.theme = "light";
      repaint();
    });
    addEventListener("afterprint", () => {
      if (theme) document.documentElement.dataset.theme = theme;
      else delete document.documentElement.dataset.theme;
      repaint();
    });
  }
  shown = map;
}

function repaint() {
  window.aevb?.retheme?.();
  shown.draw(); // at once, and not before the next frame
}
