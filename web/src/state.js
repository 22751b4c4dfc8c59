// The view in the address, so that it can be shared and survives a reload.

export class State {
  constructor() {
    this.values = new URLSearchParams(location.hash.slice(1));
    this.timer = null;
    addEventListener("hashchange", () => this.changed());
  }

  // Another address was typed or chosen from the history; a link to a part of the page is none.
  changed() {
    clearTimeout(this.timer);
    const part = document.getElementById(location.hash.slice(1));
    if (!part) {
      location.reload();
      return;
    }
    this.write();
    part.setAttribute("tabindex", "-1");
    part.focus();
  }

  get(name, otherwise = null) {
    return this.values.get(name) ?? otherwise;
  }

  numbers(name) {
    const found = (this.get(name) ?? "").split(",").map(Number);
    return this.get(name) && found.every(Number.isFinite) ? found : null;
  }

  // The k-th of some numbers if it can be a position, otherwise null.
  whole(name, k = 0) {
    const value = this.numbers(name)?.[k];
    return Number.isInteger(value) && value >= 0 && value < 2 ** 32 ? value : null;
  }

  set(changes) {
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") this.values.delete(name);
      else this.values.set(name, value);
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.write(), 150);
  }

  write() {
    const text = this.values.toString();
    try {
      history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
    } catch {
      // Some browsers keep the address of a local file as it is; the view works without it.
    }
  }
}
