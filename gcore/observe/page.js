// Draws the model in #model: the Gantt charts on canvas, the curves as SVG, the table of moves.
const NAMED = ["policy", "trainer", "switch", "controller"]; // roles with a fixed colour
const OTHERS = [...new Set(model.sources.flatMap((s) => s.roles))].filter((role) => !NAMED.includes(role)); // judges, scorers
const labels = windowLabels();
const linked = /^#step=(\d+)$/.exec(location.hash); // report.html#step=21
let label = labels.find((name) => linked && name === `Step ${linked[1]}`) || model.sources.map((s) => s.opens).find((s) => s) || null;
let zoom = null; // [from, to] in seconds since the window's beginning, or null: the whole window
let allMoves = false;

// --- small helpers -------------------------------------------------------------------------------------------
const shape = (name, attributes, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
const swatch = (fill) => Object.assign(element("i"), { style: `background:${fill}` });
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function color(name, index = 0) { // a role has the same colour in all charts; other series are coloured by index
  const role = OTHERS.indexOf(name), at = role < 0 ? index - 1 : role;
  return css(NAMED.includes(name) ? `--${name}` : at < 0 ? "--policy" : `--role-${at % 7}`);
}
function inkOn(fill) { // dark or light text, by contrast with the colour
  const [r, g, b] = [1, 3, 5].map((i) => (parseInt(fill.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.25 ? "#14171c" : "#ffffff";
}
function seconds(s) {
  const size = Math.abs(s);
  if (size >= 7200) return `${(s / 3600).toFixed(1)} h`;
  if (size >= 600) return `${(s / 60).toFixed(1)} min`;
  return `${size >= 100 ? s.toFixed(0) : size >= 10 ? s.toFixed(1) : size >= 0.1 || !size ? s.toFixed(2) : s.toFixed(4)} s`;
}
const short = (s) => seconds(s).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");
function clock(t) { // with as many digits as the view can resolve
  const size = view()[1] - view()[0];
  return size > 7200 ? seconds(t) : `${t.toFixed(size > 100 ? 1 : size > 10 ? 2 : size > 1 ? 3 : 4)} s`;
}
function amount(value, unit) {
  if (unit === "%") return `${(value * 100).toFixed(1)} %`;
  if (unit === "s") return seconds(value);
  const size = Math.abs(value);
  const text = size >= 1e6 ? `${+(value / 1e6).toFixed(2)}M` : size >= 1e4 ? `${+(value / 1e3).toFixed(1)}k`
    : Number.isInteger(value) ? String(value) : size >= 100 ? value.toFixed(0) : String(+value.toPrecision(3));
  return unit ? `${text} ${unit}` : text;
}
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const marks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) marks.push(+(i * step).toPrecision(12));
  return marks;
}

// --- the frame of a chart: a card with a legend, lines at `marks` of the y axis, and texts below the x axis ---
const HIGH = 176, PAD = { left: 46, right: 8, top: 8, bottom: 22 };
function frame(title) {
  const legend = element("p", { class: "legend" }), svg = shape("svg", { role: "img", "aria-label": title });
  svg.addEventListener("pointerleave", () => { svg.querySelector(".cross")?.remove(); hide(); });
  return { legend, svg, card: element("section", { class: "card" }, element("h2", {}, title), legend, svg) };
}
function axes(svg, [first, last], [low, top], marks, text) {
  const width = svg.clientWidth || 320, inner = width - PAD.left - PAD.right;
  const x = (v) => PAD.left + ((v - first) / (last - first)) * inner;
  const y = (v) => PAD.top + (1 - (v - low) / (top - low)) * (HIGH - PAD.top - PAD.bottom);
  svg.setAttribute("viewBox", `0 0 ${width} ${HIGH}`);
  svg.setAttribute("height", HIGH);
  svg.replaceChildren();
  for (const mark of marks) {
    svg.append(shape("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(mark), y2: y(mark) }));
    svg.append(shape("text", { x: PAD.left - 7, y: y(mark) + 4, "text-anchor": "end" }, text(mark)));
  }
  const under = (v, text) => {
    const anchor = x(v) > width - PAD.right - 14 ? "end" : "middle";
    svg.append(shape("text", { x: x(v), y: HIGH - 4, "text-anchor": anchor }, text));
  };
  return { x, y, inner, under, at: (event) => first + ((event.clientX - svg.getBoundingClientRect().left - PAD.left) / inner) * (last - first) };
}

// --- the tip -------------------------------------------------------------------------------------------------
const tip = $("tip");
function show(event, title, lines) {
  tip.replaceChildren(element("b", {}, title), ...lines.map(([fill, text, value]) => {
    const row = element("div");
    if (fill) row.append(swatch(fill));
    row.append(element("span", {}, text));
    if (value !== undefined) row.append(element("span", {}, value));
    return row;
  }));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const x = event.clientX + 14 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 14;
  const y = event.clientY + 16 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 16;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}
const hide = () => { tip.hidden = true; };

// --- windows: the steps that can be selected -------------------------------------------------------------------
function windowLabels() {
  const steps = new Map(); // by label; All comes first
  for (const source of model.sources) for (const [name, step] of source.windows) steps.set(name, step ?? -1);
  return [...steps].sort((a, b) => a[1] - b[1]).map(([name]) => name);
}
const windowOf = (source) => source.windows.find((w) => w[0] === label);
const length = () => Math.max(...model.sources.map(windowOf).filter((w) => w).map((w) => w[3] - w[2]), 1e-9);
const view = () => zoom || [0, length()];
function choose(name) {
  label = name;
  zoom = null;
  hide();
  draw();
}

function go(by) {
  const next = labels[labels.indexOf(label) + by];
  if (next) choose(next);
}

// --- the table of moves ------------------------------------------------------------------------------------------
const LIMIT = 250;
function table() {
  if (!$("moves")) return;
  const several = model.sources.length > 1;
  const listed = model.sources.flatMap((source) => {
    const step = windowOf(source)?.[1] ?? null;
    return source.moves.filter((m) => allMoves || step === null || m[0] === step).map((m) => [source.label, m]);
  });
  const head = [...(several ? ["Of"] : []), "Step", "At", "Slots", "Move", "Reason"];
  $("moves").querySelector("thead").replaceChildren(element("tr", {}, ...head.map((text) => element("th", {}, text))));
  const dot = (role) => Object.assign(element("span", { class: "dot" }), { style: `background:${color(role)}` });
  const rows = listed.slice(0, LIMIT).map(([who, [step, at, slots, from, to, reason, since]]) => element("tr", {},
    ...(several ? [element("td", {}, who)] : []),
    element("td", {}, String(step)), element("td", {}, since === null ? `at ${seconds(at)}` : `+${seconds(since)}`), element("td", {}, slots),
    element("td", {}, dot(from), from, element("span", { class: "to" }, "→"), dot(to), to), element("td", {}, reason)));
  $("moves").querySelector("tbody").replaceChildren(...rows);
  const total = model.sources.reduce((sum, s) => sum + s.num_moves, 0);
  $("moves-hint").textContent = rows.length < listed.length ? `The first ${rows.length} of ${allMoves ? total : listed.length}.`
    : rows.length ? "" : "No moves in this step.";
  $("moves-here").setAttribute("aria-pressed", String(!allMoves));
  $("moves-all").setAttribute("aria-pressed", String(allMoves));
}

// --- the whole page ------------------------------------------------------------------------------------------------
const timed = model.sources.filter((source) => source.windows.length);
const gantts = timed.map(gantt);
const charts = model.charts.map((spec) => spec.style === "histogram" ? histogram(spec) : chart(spec));
function draw() {
  if (timed.length) {
    $("step").value = label;
    $("before").disabled = labels.indexOf(label) <= 0;
    $("after").disabled = labels.indexOf(label) >= labels.length - 1;
    $("zoom-out").hidden = !zoom;
    const roles = [...new Set(timed.flatMap((source) => source.roles.map((role, i) => `${i} ${role}`)))];
    const seen = new Map(roles.map((text) => [text.slice(text.indexOf(" ") + 1), +text.split(" ")[0]]));
    $("legend").replaceChildren(...[...seen].map(([role, i]) =>
      element("span", {}, swatch(color(role, i)), role)),
      element("span", {}, element("i", { class: "idle" }), "idle"));
  }
  const samples = $("samples"), at = model.sources.length === 1 ? windowOf(model.sources[0])?.[1] ?? null : null;
  if (samples) samples.hash = at === null || label === model.sources[0].opens ? "" : `step=${at}`;
  for (const one of gantts) one.paint();
  for (const one of charts) one.paint();
  table();
}
if (timed.length) {
  $("timeline").hidden = false;
  $("gantts").append(...gantts.map((one) => one.figure));
  $("step").append(...labels.map((name) => element("option", { value: name }, name === "All" ? "All steps" : name)));
  for (const id of ["before", "step", "after"]) $(id).hidden = labels.length < 2;
  const touch = matchMedia("(pointer: coarse)").matches; // a desktop without a mouse has no pointer at all
  $("timeline-hint").textContent = [
    touch ? "Tap for details." : "Drag to zoom, double-click to leave. Click a curve below to go to its step.",
    `The strip below the bars counts ${[...new Set(timed.map((s) => s.unit))].join(" and ")} by role.`,
    timed.some((s) => s.segments.some((one) => one[4] !== null)) ? "Paler bars were less busy." : "",
    timed.some((s) => s.moves.length) ? "Triangles are moves, in the colour of the new role." : "",
    ...timed.filter((s) => s.left_out).map((s) => `A long timeline: ${s.left_out} of its steps are omitted, at even intervals.`),
  ].filter((text) => text).join(" ");
  $("step").addEventListener("change", (event) => choose(event.target.value));
  $("before").addEventListener("click", () => go(-1));
  $("after").addEventListener("click", () => go(1));
  $("zoom-out").addEventListener("click", () => choose(label));
}
$("charts").append(...charts.map((one) => one.card));
$("moves-here")?.addEventListener("click", () => { allMoves = false; table(); });
$("moves-all")?.addEventListener("click", () => { allMoves = true; table(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
let wide = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth !== wide) { wide = document.body.clientWidth; draw(); }
}).observe(document.body);
