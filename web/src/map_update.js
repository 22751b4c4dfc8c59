// A new map of a run that trains: new points and colours in the view that is open.

export function LatentMapUpdate(page, content) {
  const part = page.mapPart;
  const same = content.spaces.length === part.map.spaces.length &&
    content.spaces.every((space, i) => space.latent === part.map.spaces[i].latent && space.count === part.map.spaces[i].count);
  if (!same) {
    page.refresh("map");
    return;
  }
  const zoom = part.camera.scale / part.camera.base, { x, y } = part.camera;
  Object.assign(part.map, content);
  part.contents.map = content;
  part.run.map = part.map;
  part.points = null;
  const { polygon, pinned } = part;
  part.showView(part.viewKey, true);
  Object.assign(part.camera, { scale: part.camera.base * zoom, x, y });
  if (polygon) part.lasso(polygon);
  if (pinned >= 0 && pinned < part.points.count) part.inspect(pinned);
  part.redraw();
}
