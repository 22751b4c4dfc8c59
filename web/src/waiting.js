/** What a piece of the document ("map" or "checks") waits for, and how far its computation is. */
export const waitingText = (run, piece) =>
  [run.waiting?.[piece], run.progress?.[piece] && `(${run.progress[piece]})`].filter(Boolean).join(" ");
