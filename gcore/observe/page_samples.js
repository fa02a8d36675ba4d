// Filters and shows the groups in #model.
const BATCH = 12; // groups added at a time on scrolling
const LONG = 700; // characters beyond which a text is folded
const JUDGES = [...new Set(model.groups.flatMap((g) => g.samples.flatMap((s) => Object.keys(s.notes || {}))))].sort();
let part = ""; // the selected reward: "" is the sum
let shown = [];
let next = 0;
let range = [0, 1];

const number = (v) => v === null || v === undefined ? "none" : Number.isInteger(v) ? String(v) : Math.abs(v) >= 100 ? v.toFixed(1) : String(+v.toFixed(3));
const value = (sample) => part ? (sample.parts || {})[part] ?? null : sample.reward;
const mean = (list) => list.length ? list.reduce((sum, v) => sum + v, 0) / list.length : 0;
const known = (group) => group.samples.map(value).filter((v) => v !== null && v !== undefined);

// Part of a text, with the searched words highlighted.
function marked(content, query) {
  const low = query ? content.toLowerCase() : "", nodes = [];
  let at = 0;
  for (let hit = query ? low.indexOf(query) : -1; hit >= 0 && low.length === content.length; hit = low.indexOf(query, at)) {
    nodes.push(content.slice(at, hit), element("mark", {}, content.slice(hit, hit + query.length)));
    at = hit + query.length;
  }
  return [...nodes, content.slice(at)];
}
// A text, folded if it is long. `special`: places and names of the special tokens that it leaves out.
function text(content, query, empty = "empty", special = []) {
  const box = element("div", { class: content ? "text" : "text empty" });
  const signs = special.length ? [...content] : []; // places count characters, not units of UTF-16
  let at = 0;
  for (const [place, name] of special) {
    box.append(...marked(signs.slice(at, place).join(""), query), element("span", { class: "special", title: "special token" }, name));
    at = place;
  }
  box.append(...marked(special.length ? signs.slice(at).join("") : content || empty, query));
  if (content.length <= LONG && content.split("\n").length <= 12) return [box];
  const open = element("button", { type: "button", class: "open" }, "Show all");
  box.classList.add("long");
  open.addEventListener("click", () => {
    open.textContent = box.classList.toggle("long") ? "Show all" : "Show less";
  });
  return [box, open];
}

function answer(sample, query, ownVersion) {
  const v = value(sample), share = v === null ? 0 : (v - range[0]) / (range[1] - range[0] || 1);
  const bar = element("i");
  bar.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  const side = element("div", { class: "side" },
    element("span", { class: "reward", title: part || "reward" }, number(v)),
    element("span", { class: "gauge" }, bar));
  const facts = element("div", { class: "facts" },
    element("span", { title: "length, and why it ended" }, `${sample.length} ${sample.picture ? "step" : "token"}${sample.length === 1 ? "" : "s"}, ${sample.finish}`),
    element("span", { title: "number of the answer" }, `#${sample.sibling}`));
  if (ownVersion) facts.append(element("span", { title: "version of the policy that it comes from" }, `version ${sample.version}`));
  const chips = element("div", { class: "chips" });
  if (sample.finish === "length") chips.append(element("span", { class: "tag cut" }, "truncated"));
  if (part) chips.append(element("span", { class: "tag" }, "reward", element("b", {}, number(sample.reward))));
  const parts = Object.entries(sample.parts || {});
  if (parts.length > 1 || part) for (const [name, v] of parts) chips.append(element("span", { class: "tag" }, name, element("b", {}, number(v))));
  const output = sample.picture ? [element("img", { class: "picture", src: sample.picture, alt: `answer ${sample.sibling}` })]
    : text(sample.text, query, "picture" in sample ? "the picture is not there any more" : "empty answer", sample.special);
  const body = element("div", { class: "body" }, ...output, chips);
  for (const [judge, texts] of Object.entries(sample.notes || {})) {
    const box = element("div", { class: "verdict" });
    box.style.setProperty("--ink-of", `var(--role-${Math.max(0, JUDGES.indexOf(judge)) % 7})`);
    const worth = (sample.parts || {})[judge];
    box.append(element("div", { class: "who" }, element("b", {}, judge), worth === undefined ? "" : ` gave ${number(worth)}`));
    for (const one of texts) box.append(...text(one, query));
    body.append(box);
  }
  for (const [i, one] of (sample.segments || []).entries()) { // other conversations of the agent, trained with the same reward
    const facts = `segment ${i + 2} of ${sample.num_segments}: ${one.length} tokens, ${one.finish}` + (one.shared ? `; the first ${one.shared} are trained above` : "");
    const box = element("div", { class: "verdict segment" }, element("div", { class: "who" }, facts));
    if (one.reward !== undefined) box.firstChild.append(`; reward ${number(one.reward)}`);
    box.append(...text(one.text, query, "empty answer", one.special));
    body.append(box);
  }
  return element("li", { class: "answer" }, side, body, facts);
}

function card({ group, samples }, query) {
  const values = known(group), versions = [...new Set(group.samples.map((s) => s.version))];
  const top = element("div", { class: "top" }, element("b", {}, `Step ${group.step}`));
  if (group.phase === "eval") top.append(element("span", { class: "tag" }, group.set ? `held-out: ${group.set}` : "held-out"));
  top.append(element("span", {}, `prompt ${group.prompt}`), element("span", {}, `row ${group.row}`));
  if (versions.length === 1) top.append(element("span", { title: "version of the policy that the answers come from" }, `version ${versions[0]}`));
  if (group.siblings > group.samples.length) top.append(element("span", {}, `the first ${group.samples.length} of ${group.siblings} answers`));
  if (values.length > 1) {
    const dots = element("span", { class: "dots", role: "img", "aria-label": `${part || "reward"} of the answers: ${values.map(number).join(", ")}` });
    for (const v of values) {
      const dot = element("i");
      dot.style.left = `${4 + 92 * ((v - range[0]) / (range[1] - range[0] || 1))}%`;
      dots.append(dot);
    }
    top.append(element("span", { class: "mean" }, `mean ${number(mean(values))}`), dots);
  }
  const box = element("article", { class: "group card" }, top);
  const said = (who, content) => element("div", { class: "said" }, element("div", { class: "who" }, who || "prompt"), element("div", {}, ...text(content, query)));
  const messages = group.messages.map(([role, content]) => said(role, content));
  box.append(...messages);
  if (group.input !== undefined) { // the messages after the chat template, with its special tokens
    const whole = said("input", group.input), open = element("button", { type: "button", class: "open" }, "As the model reads it");
    whole.hidden = true;
    open.addEventListener("click", () => {
      whole.hidden = !whole.hidden;
      for (const message of messages) message.hidden = !whole.hidden;
      open.textContent = whole.hidden ? "As the model reads it" : "As messages";
    });
    box.append(whole);
    top.append(open);
  }
  if (group.images) {
    const heard = (src) => src.startsWith("data:audio");
    const shown = (src, i) => (heard(src) ? element("audio", { src, controls: "" }) : element("img", { src, alt: `image ${i + 1}` }));
    const seen = element("div", { class: "seen" }, ...group.images.map(shown));
    box.append(element("div", { class: "said" }, element("div", { class: "who" }, group.images.some(heard) ? "audio" : group.images.length > 1 ? "images" : "image"), seen));
  }
  if (group.answer !== null && group.answer !== undefined) box.append(said("reference", group.answer));
  const list = element("ol", { class: "answers" }, ...samples.map((s) => answer(s, query, versions.length > 1)));
  box.append(list);
  const rest = group.samples.filter((s) => !samples.includes(s));
  if (rest.length) {
    const open = element("button", { type: "button", class: "open" }, `Show ${rest.length} more answer${rest.length === 1 ? "" : "s"} of this group`);
    const line = element("div", { class: "hidden-answers" }, open);
    open.addEventListener("click", () => {
      list.append(...rest.map((s) => answer(s, query, versions.length > 1)));
      line.remove();
    });
    box.append(line);
  }
  return box;
}

// --- filters -------------------------------------------------------------------------------------------------
const field = (id) => $(id).value.trim() === "" || !Number.isFinite(+$(id).value) ? null : +$(id).value;
function haystack(owner, texts) { // lower case, cached
  owner.hay ??= texts().join("\n").toLowerCase();
  return owner.hay;
}
function filtered() {
  const query = $("text").value.trim().toLowerCase(), phase = $("phase").value;
  const [first, last, low, high] = ["first", "last", "low", "high"].map(field);
  const groups = [];
  for (const group of model.groups) {
    if (phase && group.phase !== phase) continue;
    if ((first !== null && group.step < first) || (last !== null && group.step > last)) continue;
    const asked = query && haystack(group, () => [...group.messages.map((m) => m[1]), group.input ?? "", String(group.answer ?? "")]).includes(query);
    const samples = group.samples.filter((s) => {
      const v = value(s);
      if ((low !== null || high !== null || part) && (v === null || v === undefined)) return false;
      if ((low !== null && v < low) || (high !== null && v > high)) return false;
      if ($("cut").checked && s.finish !== "length") return false;
      if ($("judged").checked && !Object.keys(s.notes || {}).length) return false;
      return !query || asked || haystack(s, () => [s.text, ...(s.segments ?? []).map((one) => one.text), ...(s.special ?? []).map((one) => one[1]), ...Object.values(s.notes || {}).flat()]).includes(query);
    });
    if (samples.length) groups.push({ group, samples });
  }
  return groups;
}
const spread = (group) => { const v = known(group); return v.length ? Math.max(...v) - Math.min(...v) : 0; };
const longest = (group) => Math.max(...group.samples.map((s) => s.length));
const ORDERS = {
  newest: (a, b) => b.step - a.step, oldest: (a, b) => a.step - b.step,
  low: (a, b) => mean(known(a)) - mean(known(b)), high: (a, b) => mean(known(b)) - mean(known(a)),
  spread: (a, b) => spread(b) - spread(a), long: (a, b) => longest(b) - longest(a),
};

function update() {
  part = $("part").value;
  const all = model.groups.flatMap(known);
  range = all.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [0, 0]);
  if (range[0] === range[1]) range = [0, 1];
  const order = ORDERS[$("order").value];
  shown = filtered().sort((a, b) => order(a.group, b.group));
  next = 0;
  $("groups").replaceChildren();
  const answers = shown.reduce((sum, one) => sum + one.samples.length, 0);
  const total = model.groups.reduce((sum, g) => sum + g.samples.length, 0);
  $("matches").textContent = `${answers.toLocaleString("en")} of ${total.toLocaleString("en")} answers, to ${shown.length.toLocaleString("en")} of ${model.groups.length.toLocaleString("en")} prompts`;
  if (!shown.length) $("groups").append(element("p", { class: "card none" }, "No answer is like that."));
  more();
}
function more() {
  const query = $("text").value.trim().toLowerCase();
  $("groups").append(...shown.slice(next, next + BATCH).map((one) => card(one, query)));
  next += BATCH;
}

// --- the whole page ------------------------------------------------------------------------------------------
$("part").append(element("option", { value: "" }, "total"), ...model.parts.map((name) => element("option", { value: name }, name)));
$("judged-box").hidden = !JUDGES.length;
$("phase").parentElement.hidden = new Set(model.groups.map((g) => g.phase)).size < 2;
const steps = model.groups.map((g) => g.step);
const ends = [steps[0], steps.at(-1)]; // steps are sorted
$("first").placeholder = ends[0];
$("last").placeholder = ends[1];
const link = /^#step=(\d+)$/.exec(location.hash);
if (link) $("first").value = $("last").value = link[1];
let pause = 0;
$("filters").addEventListener("input", (event) => {
  clearTimeout(pause);
  pause = setTimeout(update, event.target.id === "text" ? 150 : 0);
});
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("clear").addEventListener("click", () => { $("filters").reset(); update(); });
update();
new IntersectionObserver((seen) => {
  if (seen.some((one) => one.isIntersecting) && next < shown.length) more();
}, { rootMargin: "1500px" }).observe($("more"));
addEventListener("scroll", () => { // a batch may be shorter than the margin
  if (next < shown.length && $("more").getBoundingClientRect().top < innerHeight + 1500) more();
}, { passive: true });
