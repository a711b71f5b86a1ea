"""The page's script, which shows values under the pointer. Charts are complete without the script."""

SCRIPT = """
(() => {
  const tip = document.createElement('div'); tip.id = 'tip'; document.body.append(tip);
  const value = (pixel, map) => {
    const [start, stop, low, high, kind] = map.split(' ');
    const found = +low + (pixel - start) / (stop - start) * (high - low);
    return kind === 'log' ? 10 ** found : found;
  };
  const words = (found, map) => map.endsWith('percent') ? (100 * found).toPrecision(3) + '%'
    : Math.abs(found) >= 1000 ? Math.round(found).toLocaleString('en') : found.toPrecision(4);
  for (const plot of document.querySelectorAll('.plot')) {
    const svg = plot.ownerSVGElement, x = plot.dataset.x, y = plot.dataset.y;
    const lines = [...plot.querySelectorAll('polyline[data-name]')].map(line => [line.dataset.name,
      line.getAttribute('points').split(' ').map(pair => pair.split(',').map(Number))]);
    const label = [...plot.querySelectorAll('text')].map(text => text.textContent)
      .find(text => /step|position|distance/.test(text)) || '';
    svg.addEventListener('pointermove', event => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const found = lines.map(([name, points]) => [name,
        points.reduce((a, b) => Math.abs(b[0] - at.x) < Math.abs(a[0] - at.x) ? b : a)])
        .sort((a, b) => Math.abs(a[1][1] - at.y) - Math.abs(b[1][1] - at.y)).slice(0, 5);
      if (!found.length) return;
      const near = found.reduce((a, b) => Math.abs(b[1][0] - at.x) < Math.abs(a[1][0] - at.x) ? b : a)[1][0];
      const where = Math.round(value(near, x)).toLocaleString('en');
      tip.textContent = ''; tip.append(label.split(' ')[0] + ' ' + where);
      for (const [name, point] of found) {
        tip.append(document.createElement('br'), (name ? name + ': ' : '') + words(value(point[1], y), y));
      }
      tip.style.display = 'block';
      tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 6) + 'px';
      tip.style.top = event.clientY + 14 + 'px';
    });
    svg.addEventListener('pointerleave', () => { tip.style.display = 'none'; });
  }
})();
"""
