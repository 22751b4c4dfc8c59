// The history of a run that trains: rows arrive in pieces and are kept in growing arrays.

const BOUNDS = ["elbo", "iwae", "expected", "evidence"];
const BESIDES = ["lr", "gradient", "kl weight", "phase", "seconds", "epoch", "step", "note"];

// The best validation, by the objective of the run if it has one of its own.
function best(series) {
  const judged = ["validation objective", ...BOUNDS.map((name) => `validation ${name}`)]
    .map((key) => series.find((one) => one.key === key)).find(Boolean);
  if (!judged) return null;
  let found = null;
  judged.value.array.forEach((value, i) => {
    if (found === null || value > found.value) found = { step: judged.step.array[i], value };
  });
  return found;
}

class Growing {
  constructor() {
    this.array = new Float64Array(256);
    this.count = 0;
  }

  push(value) {
    if (this.count === this.array.length) {
      const larger = new Float64Array(2 * this.count);
      larger.set(this.array);
      this.array = larger;
    }
    this.array[this.count++] = value;
  }

  get filled() {
    return this.array.subarray(0, this.count);
  }
}

export class LiveCurves {
  constructor() {
    this.reset();
  }

  reset() {
    this.series = new Map();
    this.times = { steps: new Growing(), seconds: new Growing(), epochs: new Growing() };
    this.events = [];
    this.rows = 0;
  }

  // `columns` have equal lengths, with null where a row has no such entry.
  add({ rows, columns }) {
    const steps = columns.step ?? [];
    for (const [key, values] of Object.entries(columns)) {
      if (["step", "epoch", "seconds", "phase", "note", "kind", "about", "remedy"].includes(key)) continue;
      for (let i = 0; i < rows; i++) {
        if (typeof values[i] !== "number") continue;
        if (!this.series.has(key)) this.series.set(key, { step: new Growing(), value: new Growing() });
        const one = this.series.get(key);
        one.step.push(steps[i]);
        one.value.push(values[i]);
      }
    }
    for (let i = 0; i < rows; i++) {
      const note = columns.note?.[i];
      if (note) {
        this.events.push({ step: steps[i], kind: columns.kind?.[i] ?? "", about: columns.about?.[i] ?? "", text: note, remedy: "" });
      } else if (typeof columns.seconds?.[i] === "number") {
        this.times.steps.push(steps[i]);
        this.times.seconds.push(columns.seconds[i]);
        this.times.epochs.push(columns.epoch?.[i] ?? 0);
      }
    }
    this.rows += rows;
  }

  // The same form as a summary's curves.
  curves(before) {
    const series = [...this.series].map(([key, { step, value }]) => {
      const validation = key.startsWith("validation ");
      const name = validation ? key.slice("validation ".length) : key;
      const kind = BOUNDS.includes(name) ? "bound" : name.startsWith("kl(") ? "kl"
        : BESIDES.includes(name) ? "besides" : "term";
      return { key, name, validation, kind, title: name,
        step: { array: step.filled, shape: [step.count] }, value: { array: value.filled, shape: [value.count] } };
    });
    const titles = new Map((before?.series ?? []).map((one) => [one.key, one.title]));
    for (const one of series) one.title = titles.get(one.key) ?? one.title;
    const clock = (values) => ({
      step: { array: this.times.steps.filled, shape: [this.times.steps.count] },
      value: { array: values.filled, shape: [values.count] },
    });
    return { phases: [], ...before, best: best(series), series, events: this.events,
      seconds: clock(this.times.seconds), epochs: clock(this.times.epochs) };
  }
}
