// The history of a run that trains: rows arrive in pieces and are kept in growing arrays.

const MOST_EVENTS = 1000; // as in a finished run: the first half and the last half
// The bounds that compare validations as long as the settings of the run are unknown.
const JUDGES = ["iwae", "elbo", "evidence"];

// The best validation, by the quantity that judges the run; the first of equal ones.
function best(series, judge) {
  const judged = (judge ? [judge] : JUDGES).map((name) => series.find((one) => one.validation && one.name === name)).find(Boolean);
  if (!judged) return null;
  let found = null;
  judged.value.array.forEach((value, i) => {
    if (Number.isFinite(value) && (found === null || value > found.value)) found = { step: judged.step.array[i], value };
  });
  return found;
}

class Growing {
  constructor() {
    this.array = new Float64Array(256);
    this.count = 0;
    this.course = null; // first, last, lowest and highest finite value
  }

  push(value) {
    if (this.count === this.array.length) {
      const larger = new Float64Array(2 * this.count);
      larger.set(this.array);
      this.array = larger;
    }
    this.array[this.count++] = value;
    if (this.course === null) this.course = { first: value, last: value, low: value, high: value };
    else {
      this.course.last = value;
      if (value < this.course.low) this.course.low = value;
      if (value > this.course.high) this.course.high = value;
    }
  }

  get packed() {
    return { array: this.array.subarray(0, this.count), shape: [this.count], course: this.course };
  }
}

export class LiveCurves {
  constructor() {
    this.reset();
  }

  reset() {
    this.series = new Map();
    this.times = { steps: new Growing(), seconds: new Growing(), epochs: new Growing() };
    this.events = { first: [], last: [], count: 0 };
    this.rows = 0;
    this.lastStep = 0;
  }

  /**
   * Add rows. `columns` have equal lengths, with null where a row has no such entry; `series`
   * describes those that are curves: {key, name, validation, kind, title}.
   */
  add({ rows, columns, series = [] }) {
    const steps = columns.step ?? [];
    for (const about of [...series, ...gaps(columns)]) {
      const values = about.values ?? columns[about.key];
      if (!this.series.has(about.key)) this.series.set(about.key, { about, step: new Growing(), value: new Growing() });
      const { step, value } = this.series.get(about.key);
      for (let i = 0; i < rows; i++) {
        if (typeof values[i] !== "number") continue;
        step.push(steps[i]);
        value.push(values[i]);
      }
      if (!value.count) this.series.delete(about.key);
    }
    for (let i = 0; i < rows; i++) {
      const text = columns.note?.[i];
      if (text) {
        const entry = (name) => columns[name]?.[i] ?? "";
        this.addEvent({ step: steps[i], kind: entry("kind"), about: entry("about"), text, remedy: "" }); // a note ends with its remedy
      } else if (typeof columns.seconds?.[i] === "number") {
        this.times.steps.push(steps[i]);
        this.times.seconds.push(columns.seconds[i]);
        this.times.epochs.push(columns.epoch?.[i] ?? 0);
      }
      if (steps[i] > this.lastStep) this.lastStep = steps[i];
    }
    this.rows += rows;
  }

  addEvent(event) {
    const { first, last } = this.events;
    this.events.count++;
    if (first.length < MOST_EVENTS / 2) first.push(event);
    else last.push(event);
    if (last.length > MOST_EVENTS / 2) last.shift();
  }

  /** The same form as a summary's curves; `known` are those of the last checkpoint, without rows. */
  curves(known) {
    const series = [...this.series.values()].map(({ about: { key, name, validation, kind, title }, step, value }) =>
      ({ key, name, validation, kind, title, step: step.packed, value: value.packed }));
    const clock = (values) => (this.times.steps.count ? { step: this.times.steps.packed, value: values.packed } : null);
    const { first, last, count } = this.events;
    return {
      phases: known?.phases ?? [], judge: known?.judge ?? null, best: best(series, known?.judge), series,
      events: [...first, ...last], noted: count, seconds: clock(this.times.seconds), epochs: clock(this.times.epochs),
    };
  }
}

// log p − ELBO, where rows have both.
function gaps(columns) {
  return ["", "validation "].flatMap((prefix) => {
    const [evidence, elbo] = [columns[`${prefix}evidence`], columns[`${prefix}elbo`]];
    if (!evidence || !elbo || columns[`${prefix}gap`]) return [];
    const values = evidence.map((value, i) => (typeof value === "number" && typeof elbo[i] === "number" ? value - elbo[i] : null));
    return [{ key: `${prefix}gap`, name: "gap", validation: prefix !== "", kind: "term", title: "gap", values }];
  });
}
