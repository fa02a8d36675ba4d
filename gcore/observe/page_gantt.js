// The Gantt chart of one source, on canvas: rows by role over time, the number of busy rows below, moves above. Drag zooms.
function gantt(source) {
  const caption = element("figcaption");
  const canvas = element("canvas", { tabindex: "0", role: "img" });
  const brush = Object.assign(element("div", { class: "brush" }), { hidden: true });
  const stage = element("div", { class: "stage" }, canvas, brush);
  const figure = element("figure", { class: "gantt" }, caption, stage);
  const fill = (i) => color(source.roles[i], i);
  let box = null; // geometry of the last drawing
  let byRow = [];
  let moves = [];

  function layout(width) {
    const rows = source.rows.length;
    const longest = Math.max(...source.rows.map((name) => name.length));
    const left = source.unit === "slots" ? 38 : Math.min(width * 0.28, 16 + longest * 6.6);
    const ratio = devicePixelRatio || 1, most = Math.min(24, (innerWidth < 640 ? 420 : 560) / rows);
    const high = most * ratio >= 1 ? Math.floor(most * ratio) / ratio : most; // whole pixels, or rows would shimmer
    const strip = source.moves.length ? 12 : 0;
    return { left, right: width - 2, width: width - 2 - left, top: strip, high, rows, bottom: strip + high * rows };
  }

  function paint() {
    const window_ = windowOf(source);
    caption.replaceChildren();
    if (model.sources.length > 1) caption.append(element("b", {}, source.label));
    for (const text of window_ ? window_[4] : [`nothing recorded for ${label}`]) caption.append(element("span", {}, text));
    stage.hidden = !window_;
    if (!window_) return;
    const [, , from, to] = window_;
    const segments = source.segments.filter((s) => s[3] > from && s[2] < to);
    byRow = source.rows.map(() => []);
    for (const s of segments) byRow[s[0]].push(s);
    moves = source.moves.filter((m) => m[1] >= from && m[1] <= to);
    const width = stage.clientWidth, ratio = devicePixelRatio || 1;
    box = { ...layout(width), from };
    const under = box.bottom + 14, curve = 64, height = under + curve + 22;
    box.under = under;
    box.curve = curve;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    canvas.setAttribute("aria-label", `${source.rows.length} ${source.unit} by role, ${label}`);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
    const [a, b] = view();
    box.x = (t) => box.left + ((t - from - a) / (b - a)) * box.width;
    box.t = (x) => from + a + ((x - box.left) / box.width) * (b - a);
    pen.fillStyle = css("--track");
    const clipped = box.x(Math.min(to, from + b));
    pen.fillRect(box.left, box.top, Math.max(0, clipped - box.left), box.bottom - box.top);
    bars(pen, segments);
    occupancy(pen, segments, a, b);
    axis(pen, a, b);
    names(pen);
    markers(pen);
  }

  function bars(pen, segments) {
    const gap = box.high >= 8 ? 2 : box.high >= 4 ? 1 : 0;
    pen.save();
    pen.beginPath();
    pen.rect(box.left, 0, box.width, box.bottom);
    pen.clip();
    const ratio = devicePixelRatio || 1, snap = (y) => Math.round(y * ratio) / ratio;
    const tall = Math.max(box.high - gap, 1 / ratio);
    for (const [row, role, start, end, busy, name] of segments) {
      const x = box.x(start), wide = Math.max(box.x(end) - x - (gap > 1 ? 0.6 : 0), 0.6), y = snap(box.top + row * box.high);
      if (x > box.right || x + wide < box.left) continue;
      pen.globalAlpha = busy === null ? 1 : 0.35 + 0.65 * Math.max(0, Math.min(1, busy));
      pen.fillStyle = fill(role);
      pen.fillRect(x, y + gap / 2, wide, tall);
      const text = source.names[name] || (source.rows.length <= 8 ? source.roles[role] : "");
      if (text && tall >= 14 && wide > 26) {
        const inside = Math.min(x + wide, box.right) - Math.max(x, box.left) - 12;
        if (pen.measureText(text).width < inside) {
          pen.globalAlpha = 1;
          pen.fillStyle = inkOn(fill(role));
          pen.fillText(text, Math.max(x, box.left) + 6, y + gap / 2 + tall / 2 + 4);
        }
      }
    }
    pen.restore();
  }

  // Number of busy rows by role: each segment adds its exact share to the pixel columns that it covers.
  function occupancy(pen, segments, a, b) {
    const columns = Math.max(1, Math.floor(box.width)), per = (b - a) / columns;
    const sums = source.roles.map(() => new Float64Array(columns + 1));
    for (const [, role, start, end] of segments) {
      const first = (start - box.from - a) / per, last = (end - box.from - a) / per;
      for (let c = Math.max(0, Math.floor(first)); c < Math.min(columns, last); c++) {
        sums[role][c] += Math.min(last, c + 1) - Math.max(first, c);
      }
    }
    const base = new Float64Array(columns);
    const most = Math.max(1, source.workers);
    source.roles.forEach((name, role) => {
      if (name === "controller") return; // controllers mostly wait for other roles
      pen.fillStyle = fill(role);
      pen.beginPath();
      const y = (c, n) => box.under + box.curve * (1 - n / most);
      for (let c = 0; c < columns; c++) pen.lineTo(box.left + c, y(c, base[c] + sums[role][c]));
      for (let c = columns - 1; c >= 0; c--) pen.lineTo(box.left + c, y(c, base[c]));
      pen.fill();
      for (let c = 0; c < columns; c++) base[c] += sums[role][c];
    });
    pen.strokeStyle = css("--line");
    pen.strokeRect(box.left + 0.5, box.under + 0.5, box.width - 1, box.curve - 1);
    pen.fillStyle = css("--soft");
    pen.textAlign = "right";
    pen.fillText(String(most), box.left - 7, box.under + 9);
    pen.fillText("0", box.left - 7, box.under + box.curve);
    pen.textAlign = "left";
  }

  function axis(pen, a, b) {
    pen.fillStyle = css("--soft");
    pen.textAlign = "center";
    for (const t of ticks(a, b, box.width / 75)) {
      const x = box.x(box.from + t), text = t ? short(t) : "0";
      const half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(Math.max(x, box.left + half - 4), box.right - half), box.under + box.curve + 16);
      pen.globalAlpha = 0.5;
      pen.fillRect(Math.round(x), box.under + box.curve, 1, 4);
      pen.globalAlpha = 1;
    }
    pen.textAlign = "left";
  }

  function names(pen) {
    pen.fillStyle = css("--soft");
    pen.textAlign = "right";
    const every = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].find((n) => n * box.high >= 13) || 2048;
    source.rows.forEach((name, row) => {
      if (row % every) return;
      let text = name;
      while (pen.measureText(text).width > box.left - 8 && text.length > 3) text = `${text.slice(0, -2)}…`;
      pen.fillText(text, box.left - 7, box.top + row * box.high + Math.max(Math.min(box.high, 24) / 2, 4.5) + 4);
    });
    pen.textAlign = "left";
  }

  function markers(pen) {
    for (const [, at, , , to] of moves) {
      const x = box.x(at);
      if (x < box.left - 1 || x > box.right + 1) continue;
      pen.fillStyle = color(to, source.roles.indexOf(to));
      pen.beginPath();
      pen.moveTo(x - 4, 2);
      pen.lineTo(x + 4, 2);
      pen.lineTo(x, 9);
      pen.fill();
    }
  }

  function tell(event) {
    if (!box) return;
    const at = canvas.getBoundingClientRect(), x = event.clientX - at.left, y = event.clientY - at.top;
    if (x < box.left || x > box.right) return hide();
    const t = box.t(x);
    if (y < box.top) return tellMove(event, x);
    if (y >= box.under && y <= box.under + box.curve) return tellCount(event, t);
    const row = Math.floor((y - box.top) / box.high);
    if (row < 0 || row >= box.rows) return hide();
    const who = source.unit === "slots" ? `Slot ${source.rows[row]}` : source.rows[row];
    const here = byRow[row].filter((s) => s[2] <= t && t <= s[3]).pop();
    const before = byRow[row].filter((s) => s[3] < t).reduce((m, s) => Math.max(m, s[3]), -Infinity);
    const next = byRow[row].filter((s) => s[2] > t).reduce((m, s) => Math.min(m, s[2]), Infinity);
    const [, , from, to] = windowOf(source);
    const [start, end] = here ? [here[2], here[3]] : [Math.max(before, from), Math.min(next, to)];
    if (t > to) return hide();
    const lines = [[here ? fill(here[1]) : css("--trainer"), here ? source.roles[here[1]] : "idle", here ? source.names[here[5]] || undefined : undefined]];
    lines.push([null, `${clock(start - from)} to ${clock(end - from)}`, seconds(end - start)]);
    if (here && here[4] !== null) lines.push([null, "busy", amount(here[4], "%")]);
    show(event, who, lines);
  }
  function tellMove(event, x) {
    const near = moves.filter((m) => Math.abs(box.x(m[1]) - x) < 6);
    if (!near.length) return hide();
    const [step, at, slots, from, to, reason] = near[0];
    const lines = [[color(to), `${from} → ${to}`, `at ${clock(at - box.from)}`], [null, reason]];
    if (near.length > 1) lines.push([null, `and ${near.length - 1} more here`]);
    show(event, `Slot ${slots}, step ${step}`, lines);
  }
  function tellCount(event, t) {
    const counts = source.roles.map(() => 0);
    for (const row of byRow) for (const s of row) if (s[2] <= t && t < s[3] && source.roles[s[1]] !== "controller") counts[s[1]]++;
    const lines = source.roles.map((role, i) => [fill(i), role, String(counts[i])]).filter((line) => line[2] !== "0");
    show(event, `${source.unit[0].toUpperCase()}${source.unit.slice(1)} at ${clock(t - box.from)}`, lines.length ? lines : [[null, "none at work"]]);
  }

  let pressed = null;
  const inside = (event) => Math.min(Math.max(event.clientX - canvas.getBoundingClientRect().left, box.left), box.right);
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    pressed = inside(event);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (pressed === null) return tell(event);
    const x = inside(event);
    brush.hidden = Math.abs(x - pressed) < 5;
    brush.style.left = `${Math.min(x, pressed)}px`;
    brush.style.width = `${Math.abs(x - pressed)}px`;
  });
  canvas.addEventListener("pointerup", (event) => {
    const x = inside(event), start = pressed;
    pressed = null;
    brush.hidden = true;
    if (start === null || Math.abs(x - start) < 5) return;
    zoom = [Math.min(x, start), Math.max(x, start)].map((at) => box.t(at) - box.from);
    hide();
    draw();
  });
  canvas.addEventListener("pointercancel", () => { pressed = null; brush.hidden = true; });
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("dblclick", () => choose(label));
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") go(-1);
    if (event.key === "ArrowRight") go(1);
    if (event.key === "Escape") choose(label);
  });
  return { figure, paint };
}
