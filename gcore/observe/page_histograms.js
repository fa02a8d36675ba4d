// A histogram as SVG: shares of the samples per bar, one outline per series.
function histogram(spec) {
  const { legend, svg, card } = frame(spec.title);
  const [low, last] = [spec.edges[0], spec.edges.at(-1)], bars = spec.edges.length - 1;
  const marks = ticks(0, Math.max(...spec.series.flatMap((s) => s.y), 1e-9), 4);
  const top = Math.max(marks.at(-1), ...spec.series.flatMap((s) => s.y));
  let scale = null;
  spec.series.forEach((s, i) => legend.append(
    element("span", {}, swatch(color("", i)), s.name)));

  function paint() {
    scale = axes(svg, [low, last], [0, top], marks, (mark) => `${+(mark * 100).toPrecision(4)} %`);
    const { x, y } = scale;
    spec.series.forEach((s, i) => {
      let line = `M${x(low).toFixed(1)},${y(0)}`;
      s.y.forEach((share, j) => {
        line += `L${x(spec.edges[j]).toFixed(1)},${y(share).toFixed(1)}L${x(spec.edges[j + 1]).toFixed(1)},${y(share).toFixed(1)}`;
      });
      line += `L${x(last).toFixed(1)},${y(0)}Z`;
      svg.append(shape("path", { d: line, fill: color("", i), "fill-opacity": 0.22, stroke: color("", i), "stroke-width": 1.5, "stroke-linejoin": "round" }));
    });
    for (const v of ticks(low, last, scale.inner / 80)) scale.under(v, amount(v, ""));
  }
  svg.addEventListener("pointermove", (event) => {
    const j = Math.min(Math.max(Math.floor(((scale.at(event) - low) / (last - low)) * bars), 0), bars - 1);
    const range = `${amount(spec.edges[j], "")} to ${amount(spec.edges[j + 1], spec.unit)}`;
    show(event, range, spec.series.map((s, i) => [color("", i), s.name, amount(s.y[j], "%")]));
  });
  return { card, paint };
}
