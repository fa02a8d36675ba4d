// A curve over the steps, as SVG. A click goes to the step.
function chart(spec) {
  const { legend, svg, card } = frame(spec.title);
  const shown = spec.series.filter((s) => s.x.length);
  const isRole = spec.series.every((s) => NAMED.includes(s.name) || OTHERS.includes(s.name));
  const ink = (s, i) => isRole ? color(s.name) : color("", s.thin ? 0 : i - shown.slice(0, i).filter((o) => o.thin).length);
  const xs = [...new Set(shown.flatMap((s) => s.x))].sort((a, b) => a - b);
  const stacked = spec.style === "stack" ? stack(shown) : null;
  const values = stacked ? stacked.at(-1) : shown.flatMap((s) => s.y);
  let low = Math.min(0, ...values), top = Math.max(...values, low + 1e-9);
  const whole = values.every((value) => Number.isInteger(value));
  const marks = ticks(low, top, 4).filter((mark) => !whole || Number.isInteger(mark));
  if (marks.length > 1 && marks.at(-1) < top && !(stacked && spec.unit === "")) marks.push(+(2 * marks.at(-1) - marks.at(-2)).toPrecision(12));
  if (spec.unit === "%" && top <= 1 && marks.at(-1) > 1) marks.pop();
  top = Math.max(top, marks.at(-1));
  let scale = null;

  function stack(series) {
    const sum = series[0].y.map(() => 0);
    return series.map((s) => s.y.map((y, i) => (sum[i] += y)));
  }
  function paint() {
    const [first, last] = [xs[0], Math.max(xs.at(-1), xs[0] + 1e-9)];
    const share = (mark) => `${+(mark * 100).toPrecision(4)} %`;
    const text = (mark) => spec.unit === "%" ? share(mark) : spec.unit === "s" && mark ? short(mark) : amount(mark, "");
    scale = axes(svg, [first, last], [low, top], marks, text);
    const { x, y } = scale;
    ticks(first, last, scale.inner / 70).filter((v) => Number.isInteger(v))
      .forEach((v, i) => scale.under(v, i ? String(v) : `step ${v}`));
    const step = model.sources.map(windowOf).filter((w) => w && w[1] !== null).map((w) => w[1])[0];
    if (step !== undefined && step >= first && step <= last) {
      svg.append(shape("line", { class: "here", x1: x(step), x2: x(step), y1: PAD.top, y2: HIGH - PAD.bottom }));
    }
    const points = (s, list) => s.x.map((v, i) => `${x(v).toFixed(1)},${y(list[i]).toFixed(1)}`);
    shown.forEach((s, i) => {
      if (stacked) {
        const floor = i ? points(s, stacked[i - 1]) : s.x.map((v) => `${x(v).toFixed(1)},${y(0).toFixed(1)}`);
        svg.append(shape("path", { d: `M${points(s, stacked[i]).join("L")}L${floor.reverse().join("L")}Z`, fill: ink(s, i) }));
      } else if (s.dots) {
        s.x.forEach((v, j) => svg.append(shape("circle", { cx: x(v), cy: y(s.y[j]), r: 4, fill: ink(s, i), stroke: css("--card"), "stroke-width": 1.5 })));
      } else {
        const line = `M${points(s, s.y).join("L")}`;
        if (shown.length === 1) svg.append(shape("path", { d: `${line}L${x(s.x.at(-1))},${y(low)}L${x(s.x[0])},${y(low)}Z`, fill: ink(s, i), opacity: 0.1 }));
        svg.append(shape("path", { d: line, fill: "none", stroke: ink(s, i), "stroke-width": s.thin ? 1 : 2, "stroke-linejoin": "round", opacity: s.thin ? 0.4 : 1 }));
      }
    });
    legend.replaceChildren();
    if (shown.length > 1) {
      shown.forEach((s, i) => {
        if (!s.thin) legend.append(element("span", {}, swatch(ink(s, i)), s.name));
      });
    } else {
      legend.append(element("span", {}, `last ${amount(shown[0].y.at(-1), spec.unit)}`));
    }
  }
  const stepAt = (event) => {
    const v = scale.at(event);
    return xs.reduce((best, one) => Math.abs(one - v) < Math.abs(best - v) ? one : best, xs[0]);
  };
  svg.addEventListener("pointermove", (event) => {
    const step = stepAt(event);
    svg.querySelector(".cross")?.remove();
    svg.append(shape("line", { class: "cross", x1: scale.x(step), x2: scale.x(step), y1: PAD.top, y2: HIGH - PAD.bottom }));
    const lines = shown.map((s, i) => [ink(s, i), s.name, s.x.includes(step) ? amount(s.y[s.x.indexOf(step)], spec.unit) : undefined]);
    const known = lines.filter((line) => line[2] !== undefined).map((line) => shown.length > 1 ? line : [null, spec.title, line[2]]);
    show(event, `Step ${Math.round(step)}`, known);
  });
  svg.addEventListener("click", (event) => {
    const steps = model.sources.flatMap((s) => s.windows).filter((w) => w[1] !== null);
    const step = stepAt(event);
    if (steps.length) choose(steps.reduce((best, w) => Math.abs(w[1] - step) < Math.abs(best[1] - step) ? w : best)[0]);
  });
  return { card, paint };
}
