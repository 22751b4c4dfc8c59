// Bundles src/ into src/aevb/page/static: app.js, app.css, licences, and a hash of the source.
// `node build.mjs --check` writes nothing and fails if the bundle is not that of the source.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync, mkdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "../src/aevb/page/static");
const common = { bundle: true, minify: true, write: false, legalComments: "none", charset: "utf8" };
const script = await build({
  ...common, entryPoints: [join(here, "src/main.js")], format: "esm", target: "es2022",
});
const style = await build({ ...common, entryPoints: [join(here, "src/style.css")] });
const licence = readFileSync(join(here, "node_modules/uplot/LICENSE"), "utf8");

const hash = createHash("sha256");
for (const name of readdirSync(join(here, "src")).sort()) {
  hash.update(name + "\0").update(readFileSync(join(here, "src", name))).update("\0");
}
const files = {
  "app.js": script.outputFiles[0].text,
  "app.css": style.outputFiles[0].text,
  "LICENSES.txt": `The page contains uPlot (MIT).\n\n${licence}`,
  "source.sha256": hash.digest("hex") + "\n",
};
if (process.argv.includes("--check")) {
  const other = Object.keys(files).filter((name) => {
    try { return readFileSync(join(out, name), "utf8") !== files[name]; } catch { return true; }
  });
  if (other.length) {
    console.error(`Not built from this source: ${other.join(", ")}. Run: npm run build`);
    process.exit(1);
  }
} else {
  mkdirSync(out, { recursive: true });
  for (const [name, text] of Object.entries(files)) writeFileSync(join(out, name), text);
  for (const [name, text] of Object.entries(files)) console.log(name, text.length);
}
