// The connection of a page to `aevb serve`. Everything goes to the server that sent the page.

const LONGEST_PAUSE = 30_000; // milliseconds between two attempts to connect

/** Whether a server sent this page, and not a file. */
export const isLive = () => document.body.dataset.live !== undefined;

/** What the server answered instead of a result; the message is a sentence for the user. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.name = 'ServerError';
    this.status = status;
  }
}

async function get(address, { signal, headers } = {}) {
  let response;
  try {
    response = await fetch(address, { signal, headers, credentials: 'same-origin', redirect: 'error' });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ServerError('The server does not answer. Is aevb serve still running?');
  }
  let content;
  try {
    content = await response.json();
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ServerError('The server sent something that is not JSON.', response.status);
  }
  if (!response.ok) throw new ServerError(content.error ?? `Status ${response.status}`, response.status);
  return { content, version: response.headers.get('Aevb-Version') };
}

/** The runs: [{run, name, folder, state, step, total, versions: {summary, map, checks}}]. */
export const fetchRuns = async (options) => (await get('/api/runs', options)).content.runs;

/**
 * A part of a run ("summary", "map" or "checks"): {content, version}, or {waiting: sentence} if it
 * cannot be computed yet.
 */
export async function fetchPart(i, part, options) {
  const found = await get(`/api/runs/${i}/${part}`, options);
  return found.content?.waiting !== undefined ? { waiting: found.content.waiting } : found;
}

/** The comparison of all runs: {content, version} or {waiting: sentence}. */
export async function fetchComparison(options) {
  const found = await get('/api/comparison', options);
  return found.content?.waiting !== undefined ? { waiting: found.content.waiting } : found;
}

const decoding = new Map(); // by run and purpose: whether a request is under way, and the one that waits

/**
 * Decoded values of latents. Only the newest request for a purpose matters, for example while a hand
 * moves a slider: a request that a newer one has replaced resolves to null.
 */
export function decode(i, request, purpose = '') {
  const key = `${i} ${purpose}`;
  const one = decoding.get(key) ?? { busy: false, next: null };
  decoding.set(key, one);
  return new Promise((resolve, reject) => {
    one.next?.resolve(null);
    one.next = { request, resolve, reject };
    if (!one.busy) work(i, one);
  });
}

async function work(i, one) {
  one.busy = true;
  while (one.next !== null) {
    const { request, resolve, reject } = one.next;
    one.next = null;
    try {
      const text = encodeURIComponent(JSON.stringify(request));
      resolve((await get(`/api/runs/${i}/decode?request=${text}`)).content);
    } catch (error) {
      reject(error);
    }
  }
  one.busy = false;
}

/**
 * Follow the runs. Callbacks, all optional:
 *   hello({runs})                         after every connection: the runs as fetchRuns lists them
 *   reset({run})                          forget the rows of a run: its history begins again
 *   rows({run, rows, columns, skipped})   new rows as columns of equal length, null where missing
 *   state({run, state, step, total})      "waiting", "training", "finished" or "stopped"
 *   version({run, part, version})         a part has changed: fetch it, unless fetchPart
 *                                         has already returned this version
 *   progress({run, part, text})           how far a computation is
 *   connection(isOpen)                    the connection was made or lost
 * The rows of a run that has finished are in its summary; those of others come from the start.
 * Returns {close}.
 */
export function connect(callbacks) {
  let source = null;
  let last = ''; // the id of the newest event, where a new connection goes on
  let pause = 1000;
  let timer = null;
  let closed = false;
  let open = false;

  const tell = (name, value) => callbacks[name]?.(value);
  const setOpen = (value) => {
    if (open !== value) tell('connection', (open = value));
  };

  function begin() {
    timer = null;
    source = new EventSource(last ? `/api/events?after=${encodeURIComponent(last)}` : '/api/events');
    for (const name of ['hello', 'reset', 'rows', 'state', 'version', 'progress']) {
      source.addEventListener(name, (event) => {
        last = event.lastEventId || last;
        tell(name, JSON.parse(event.data));
      });
    }
    source.addEventListener('open', () => {
      pause = 1000;
      setOpen(true);
    });
    source.addEventListener('error', () => {
      setOpen(false);
      // The browser connects again by itself, unless the server refused the connection.
      if (source.readyState === EventSource.CLOSED) again();
    });
  }

  function again() {
    source.close();
    if (closed || timer !== null) return;
    timer = setTimeout(begin, pause * (0.75 + Math.random() / 2));
    pause = Math.min(2 * pause, LONGEST_PAUSE);
  }

  begin();
  return {
    close() {
      closed = true;
      clearTimeout(timer);
      source.close();
      setOpen(false);
    },
  };
}
