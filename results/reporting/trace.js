"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  // Texts are only ever set as text nodes: what a model wrote is shown and never parsed as HTML.
  const el = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === undefined || value === null || value === false) continue;
      if (name === "class") made.className = value;
      else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  };
  const short = (value, digits = 3) => Number.isNaN(value) || value === null || value === undefined ? "–" : String(+value.toPrecision(digits));
  const signed = (value) => (value > 0 ? "+" : "") + short(value);

  // --- all answers, in one list -------------------------------------------------------------------------------------
  const answers = [];
  data.steps.forEach((step, s) => {
    let token = 0, number = 0;
    step.groups.forEach((group, g) => {
      group.step = s;
      group.trajectories.forEach((one, index) => {
        Object.assign(one, { group, index, s, at: answers.length, token, number });
        token += one.prompt + one.length;
        number += one.length;
        answers.push(one);
      });
      const known = group.trajectories.map((one) => one.parts.acc ?? one.score);
      group.mean = known.reduce((a, b) => a + b, 0) / known.length;
    });
  });
  const groups = data.steps.flatMap((step) => step.groups);
  const key = (group) => JSON.stringify([group.data_source, group.uid]);
  const same = Map.groupBy ? Map.groupBy(groups, key) : groups.reduce((m, g) => m.set(key(g), [...(m.get(key(g)) || []), g]), new Map());
  for (const found of same.values())
    for (const group of found) group.flipped = found.some((other) => (other.mean >= 0.5) !== (group.mean >= 0.5));
  const place = (s) => `${data.runs.length > 1 ? data.runs[data.steps[s].run] + ", " : ""}step ${data.steps[s].step}`;

  // --- columns ------------------------------------------------------------------------------------------------------
  let half = null;
  const halves = () => {
    if (half) return half;
    half = new Float32Array(65536);
    for (let i = 0; i < 65536; i++) {
      const sign = i >> 15 ? -1 : 1, exponent = (i >> 10) & 31, fraction = i & 1023;
      half[i] = exponent === 31 ? (fraction ? NaN : sign * Infinity)
        : exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -14 * (fraction / 1024);
    }
    return half;
  };
  const inflated = (step) => step.ready ??= (async () => {
    const packed = Uint8Array.from(atob(step.data), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
    step.data = null;
    step.column = {};
    let start = 0;
    for (const [name, kind, scale, count] of step.columns) {
      const size = { u8: 1, u16: 2, f16: 2, u32: 4 }[kind];
      const out = kind === "f16" ? new Float32Array(count) : new Uint32Array(count);
      const table = kind === "f16" ? halves() : null;
      for (let i = 0; i < count; i++) {
        let raw = 0;
        for (let b = 0; b < size; b++) raw += bytes[start + b * count + i] * 2 ** (8 * b);
        out[i] = table ? table[raw] * scale : raw;
      }
      step.column[name] = out;
      start += size * count;
    }
    return step;
  })();
  const text = (number) => { const one = data.tokens[number]; return typeof one === "string" ? one : `‹${one.bytes || one.name}›`; };
  const textOf = (one) => {
    if (one.text === undefined) {
      const tokens = data.steps[one.s].column?.token;
      if (!tokens) return "";
      const parts = [];
      for (let i = one.token; i < one.token + one.prompt + one.length; i++) parts.push(text(tokens[i]));
      one.text = parts.join("").toLowerCase();
    }
    return one.text;
  };

  // --- fields: how a token is coloured ------------------------------------------------------------------------------
  const number = (name, one, t) => {
    const column = data.steps[one.s].column?.[name];
    return column && t >= one.prompt ? column[one.number + t - one.prompt] : NaN;
  };
  const flag = (one, t, bit) => (data.steps[one.s].column.flags[one.token + t] & bit) !== 0;
  const turnOf = (one, t) => one.stretches.find((turn) => t >= turn.start && t < turn.end) ?? one.stretches.at(-1);
  const learner = (one, t) => number("engine", one, t) + number("gap", one, t);
  const has = (name) => data.steps.some((step) => step.columns.some((column) => column[0] === name));
  const FIELDS = [
    { id: "who", name: "who wrote it", of: (o, t) => turnOf(o, t).role, kinds: [["policy", "--mark"], ["tool", "--tool"], ["retrieved", "--found"], ["prompt", null]] },
    { id: "mask", name: "mask and loss", kinds: [["carries loss", "--mark"], ["in the mask, no loss", "--tool"], ["loss outside the mask", "--bad"], ["neither", null]],
      of: (o, t) => o.skipped ? (flag(o, t, 1) ? "in the mask, no loss" : "neither") : flag(o, t, 4) ? (flag(o, t, 1) ? "carries loss" : "loss outside the mask") : flag(o, t, 1) ? "in the mask, no loss" : "neither" },
    { id: "engine", name: "log-prob, engine", of: (o, t) => number("engine", o, t), needs: "engine" },
    { id: "learner", name: "log-prob, learner", of: learner, needs: "gap" },
    { id: "gap", name: "learner less engine", of: (o, t) => number("gap", o, t), needs: "gap", signed: true },
    { id: "ratio", name: "ratio and clip", of: (o, t) => number("ratio", o, t), needs: "ratio", signed: true, shown: (v) => short(1 + v) },
    { id: "advantage", name: "advantage", of: (o, t) => number("advantage", o, t), needs: "advantage", signed: true },
    { id: "entropy", name: "entropy", of: (o, t) => number("entropy", o, t), needs: "entropy" },
    { id: "value", name: "value", of: (o, t) => number("value", o, t), needs: "value", signed: true },
    { id: "return", name: "return", of: (o, t) => number("return", o, t), needs: "return", signed: true },
    { id: "weight", name: "loss weight", of: (o, t) => number("weight", o, t), needs: "weight" },
    { id: "reference", name: "learner less reference", of: (o, t) => number("reference", o, t), needs: "reference", signed: true },
    { id: "importance", name: "importance weight", of: (o, t) => number("importance", o, t), needs: "importance" },
    { id: "age", name: "age of the policy", of: (o, t) => flag(o, t, 2) ? o.age : NaN },
  ].filter((field) => !field.needs || has(field.needs));
  const scaleOf = (field) => {
    if (field.scale) return field.scale;
    const sizes = [];
    const one = field.id === "age" ? answers.map((a) => a.age) : null;
    const every = Math.ceil(answers.reduce((sum, a) => sum + a.length, 0) / 20000);
    for (const answer of one ? [] : answers)
      for (let t = answer.prompt; t < answer.prompt + answer.length; t += every) {
        const value = field.of(answer, t);
        if (Number.isFinite(value)) sizes.push(Math.abs(value));
      }
    const sorted = (one ?? sizes).sort((a, b) => a - b);
    const scale = sorted[Math.floor(sorted.length * 0.99)] || sorted.at(-1) || 1;
    if (data.steps.every((step) => step.column)) field.scale = scale; // of all steps, once they are unpacked
    return scale;
  };
  const look = (field, one, t) => {
    const value = field.of(one, t);
    if (field.kinds) {
      const colour = field.kinds.find(([kind]) => kind === value)?.[1];
      return colour ? [`var(${colour})`, 26] : [null, 0];
    }
    if (Number.isNaN(value)) return [null, -1];
    const share = Math.min(1, Math.abs(value) / scaleOf(field));
    return [field.signed && value < 0 ? "var(--cold)" : "var(--hot)", Math.round(62 * share)];
  };

  // --- state --------------------------------------------------------------------------------------------------------
  const state = { at: 0, beside: "", alone: data.runs.length < 2, field: FIELDS[0], token: null, filters: new Set(), open: new Map(), query: "" };
  let panes = [];
  const FILTERS = {
    recurs: (one) => same.get(key(one.group)).length > 1,
    flipped: (one) => one.group.flipped,
    truncated: (one) => one.stop === "length",
    "tool error": (one) => one.error,
    findings: (one) => one.findings.length > 0,
  };
  const passes = (one) => {
    if ($("source").value && one.group.data_source !== $("source").value) return false;
    if ($("from").value !== "" && one.score < +$("from").value) return false;
    if ($("to").value !== "" && one.score > +$("to").value) return false;
    for (const name of state.filters) if (!FILTERS[name](one)) return false;
    return !state.query || one.group.question.toLowerCase().includes(state.query) || textOf(one).includes(state.query);
  };

  // --- the list -----------------------------------------------------------------------------------------------------
  const row = (one) => {
    const right = (one.parts.acc ?? one.score) > 0;
    const parts = Object.entries(one.parts).filter(([name, value]) => name !== "score" || value !== one.score);
    const tags = [];
    if (one.findings.length) tags.push(el("span", { class: "tag alarm" }, `${one.findings.length} finding${one.findings.length > 1 ? "s" : ""}`));
    if (one.error) tags.push(el("span", { class: "tag" }, "tool error"));
    if (one.masked) tags.push(el("span", { class: "tag" }, "masked: no loss"));
    if (!["ok", "wrong"].includes(one.status)) tags.push(el("span", { class: "tag" }, one.status.replace("_", " ")));
    return el("button", { class: "row", type: "button", "data-at": one.at, onclick: () => choose(one.at) },
      el("span", { class: "soft" }, String(one.index + 1)),
      el("span", { class: "num " + (right ? "right" : "wrong") }, short(one.score)),
      el("span", { class: "parts", title: parts.map(([n, v]) => `${n} ${short(v)}`).join(", ") }, parts.map(([n, v]) => `${n} ${short(v)}`).join(" · ")),
      el("span", { class: "num" }, String(one.length)),
      el("span", { class: "num" }, String(one.turns)),
      el("span", { title: one.stop.replace("_", " ") }, one.stop.replace("stop_", "")),
      tags.length ? el("span", { class: "tags" }, ...tags) : null);
  };
  // Questions that begin with the same long instructions would all look alike in the list.
  const beginnings = {};
  for (const { group } of answers) {
    const known = beginnings[group.data_source] ??= { shared: group.question, several: false };
    while (!group.question.startsWith(known.shared)) [known.shared, known.several] = [known.shared.slice(0, -1), true];
  }
  const titleOf = (group) => {
    const { shared, several } = beginnings[group.data_source], end = shared.lastIndexOf(" ");
    return several && end > 60 ? "…" + group.question.slice(end) : group.question || group.uid;
  };
  const WHY = { worst: "the worst of its step", question: "one of the regular ones" };
  const list = () => {
    const shown = answers.filter(passes);
    const made = [];
    let step = null, group = null, box = null;
    for (const one of shown) {
      if (one.s !== step) made.push(el("div", { class: "step" }, place((step = one.s))));
      if (one.group !== group) {
        group = one.group;
        const kept = `here as ${WHY[group.chosen]}`;
        box = el("div", { class: "group" }, el("h2", { title: group.question }, titleOf(group)),
          el("p", {}, `${group.data_source} · mean ${short(group.mean)} · ${kept}${group.flipped ? " · flipped" : ""}`),
          el("div", { class: "head", "aria-hidden": true }, el("span", {}, "#"), el("span", { class: "num" }, "score"), el("span", {}, "parts"),
            el("span", { class: "num" }, "tokens"), el("span", { class: "num" }, "turns"), el("span", {}, "stop")));
        made.push(box);
      }
      box.append(row(one));
    }
    $("list").replaceChildren(...(made.length ? made : [el("p", { class: "soft" }, "No answer passes the filters.")]));
    $("summary").textContent = `${shown.length} of ${answers.length} answers, ${new Set(shown.map((o) => o.group)).size} groups, `
      + `${new Set(shown.map((o) => o.s)).size} recorded steps` + (data.runs.length > 1 ? ` of ${data.runs.join(" and ")}` : "")
      + ` · ${answers.filter((o) => o.findings.length).length} with findings`;
    if (shown.length && !shown.includes(answers[state.at])) choose(shown[0].at, false);
    else mark();
  };
  const mark = () => {
    for (const old of $("list").querySelectorAll("[aria-current]")) old.removeAttribute("aria-current");
    const now = $("list").querySelector(`[data-at="${state.at}"]`);
    now?.setAttribute("aria-current", "true");
    now?.scrollIntoView({ block: "nearest" });
  };

  // --- the reader ---------------------------------------------------------------------------------------------------
  const others = (one) => {
    const found = (same.get(key(one.group)) ?? []).filter((group) => group !== one.group)
      .map((group) => [group.trajectories[Math.min(one.index, group.trajectories.length - 1)], `${place(group.step)}, the same question`]);
    const own = one.group.trajectories.filter((other) => other !== one).map((other) => [other, `answer ${other.index + 1} of this group`]);
    return [...found, ...own].map(([other, name]) => ({ other, name, id: String(other.at) }));
  };
  const span = (one, t, tokens) => {
    const known = data.tokens[tokens[one.token + t]];
    const made = el("span", { class: "t" });
    made.t = t;
    if (typeof known === "string") {
      const special = /^<[|/]?\w[\w|]*>$/.test(known) && flag(one, t, 2) === false ? false : /^<(\|[\w-]+\||\/?s|pad|eos|bos|unk)>$/.test(known);
      if (special) made.classList.add("special");
      made.textContent = known === "\n" ? "↵\n" : known === "" ? "∅" : known;
    } else {
      made.classList.add("bytes");
      made.textContent = known.bytes ? known.bytes.match(/../g).join(" ").toUpperCase() : known.name || "?";
    }
    return made;
  };
  const paint = (pane) => {
    const { one, spans } = pane, ratio = state.field.id === "ratio", query = state.query;
    const hits = new Uint8Array(spans.length);
    if (query) {
      let end = 0;
      const ends = spans.map((_, t) => (end += text(data.steps[one.s].column.token[one.token + t]).length));
      for (let at = textOf(one).indexOf(query); at >= 0; at = textOf(one).indexOf(query, at + 1))
        for (let t = ends.findIndex((e) => e > at); t >= 0 && t < spans.length && (t ? ends[t - 1] : 0) < at + query.length; t++) hits[t] = 1;
    }
    spans.forEach((made, t) => {
      const [colour, share] = look(state.field, one, t);
      made.style.cssText = colour ? `--c:${colour};--p:${share}%` : "";
      made.classList.toggle("none", share < 0);
      made.classList.toggle("found", flag(one, t, 32));
      made.classList.toggle("clip", ratio && (flag(one, t, 8) || flag(one, t, 16)));
      made.classList.toggle("hit", hits[t] === 1);
    });
  };
  const turn = (pane, stretch, index) => {
    const { one } = pane, tokens = data.steps[one.s].column.token, count = stretch.end - stretch.start;
    const box = el("div", { class: "tokens" });
    for (let t = stretch.start; t < stretch.end; t++) box.append((pane.spans[t] = span(one, t, tokens)));
    const open = state.open.get(`${one.at}.${index}`) ?? stretch.role === "policy";
    const summary = el("summary", {}, el("b", {}, stretch.role), ` · ${count} token${count === 1 ? "" : "s"}`,
      stretch.query ? ` · query: ${stretch.query}` : "", stretch.passages ? ` · ${stretch.passages.length} passages` : "",
      stretch.error ? el("span", { class: "alarm" }, " · error") : "");
    const made = el("details", { class: stretch.role, open }, summary,
      stretch.passages ? el("ol", { class: "titles" }, ...stretch.passages.map((title) => el("li", {}, title))) : null, box);
    made.addEventListener("toggle", () => state.open.set(`${one.at}.${index}`, made.open));
    return made;
  };
  const pane = (one) => {
    const made = { one, spans: new Array(one.prompt + one.length) };
    const age = one.age === 0 ? "the newest policy" : `a policy ${one.age} step${one.age === 1 ? "" : "s"} old`;
    const parts = Object.entries(one.parts).map(([n, v]) => `${n} ${short(v)}`).join(", ");
    const body = el("div", {}, ...one.stretches.map((stretch, index) => turn(made, stretch, index)));
    made.node = el("article", { class: "pane" },
      el("h2", {}, `Answer ${one.index + 1} of ${one.group.trajectories.length}, ${place(one.s)}`),
      el("p", { class: "about" }, `score ${short(one.score)} (${parts}) · read as ${one.pred ?? "nothing"} · expected ${typeof one.group.truth === "object" ? JSON.stringify(one.group.truth) : one.group.truth}`
        + (one.skipped ? " · no gradient: the update did not read it" : "") + ` · stop: ${one.stop.replace("_", " ")} · ${one.length} tokens, ${one.turns} turn${one.turns === 1 ? "" : "s"}, ${one.tool_calls} tool call${one.tool_calls === 1 ? "" : "s"} · ${age}`),
      one.findings.length ? el("ul", { class: "findings", "aria-label": "Findings" }, ...one.findings.map((found) =>
        el("li", {}, el("button", { type: "button", onclick: () => found.tokens.length && go(made, found.tokens[0]) }, el("b", {}, found.check), ` · ${found.text}`)))) : null,
      body);
    body.addEventListener("pointerover", (event) => event.target.t !== undefined && inspect(made, event.target.t));
    body.addEventListener("click", (event) => event.target.t !== undefined && go(made, event.target.t));
    return made;
  };
  const reader = async () => {
    const one = answers[state.at], choices = others(one);
    if (!choices.some((choice) => choice.id === state.beside)) state.beside = "";
    if (!state.beside && !state.alone) state.beside = choices.find((choice) => data.steps[choice.other.s].run !== data.steps[one.s].run)?.id ?? "";
    const beside = choices.find((choice) => choice.id === state.beside)?.other;
    await Promise.all([one, beside].filter(Boolean).map((each) => inflated(data.steps[each.s])));
    if (one !== answers[state.at]) return;
    panes = [one, beside].filter(Boolean).map(pane);
    const select = el("select", { id: "beside", onchange: () => { state.beside = select.value; state.alone = !select.value; reader(); } }, el("option", { value: "" }, "nothing"),
      ...choices.map((choice) => el("option", { value: choice.id, selected: choice.id === state.beside }, choice.name)));
    $("reader").replaceChildren(
      el("div", { class: "question" }, one.group.question || "(no question)"),
      el("label", { class: "beside" }, "Beside it: ", select,
        choices.some((choice) => choice.other.group !== one.group) ? null : el("span", {}, "no other recorded step has this question")),
      el("div", { class: "panes" }, ...panes.map((each) => each.node)));
    panes.forEach(paint);
    document.body.dataset.ready = "true";
  };
  const inspect = (pane, t) => {
    const { one } = pane, spans = pane.spans, tokens = data.steps[one.s].column.token, known = data.tokens[tokens[one.token + t]];
    const facts = [el("b", {}, typeof known === "string" ? JSON.stringify(known) : `bytes ${known.bytes || known.name}`)];
    if (typeof known !== "string" && known.bytes) {
      let first = t, last = t;
      const bytesAt = (i) => i >= 0 && i < spans.length && data.tokens[tokens[one.token + i]].bytes;
      while (bytesAt(first - 1)) first--;
      while (bytesAt(last + 1)) last++;
      let hex = "";
      for (let i = first; i <= last; i++) hex += bytesAt(i);
      const whole = new TextDecoder().decode(Uint8Array.from(hex.match(/../g), (pair) => parseInt(pair, 16)));
      facts.push(el("span", {}, whole.includes("\ufffd") ? "no valid UTF-8" : `part of ${whole}`));
    }
    facts.push(el("span", { class: "soft" }, `token ${t + 1} of ${one.prompt + one.length}`));
    for (const field of FIELDS) {
      const value = field.of(one, t);
      if (typeof value === "number" && Number.isNaN(value)) continue;
      const shown = typeof value === "string" ? value : field.shown ? field.shown(value) : field.signed ? signed(value) : short(value);
      const clip = field.id === "ratio" && flag(one, t, 8) ? " (clipped)" : field.id === "ratio" && flag(one, t, 16) ? " (dual clip)" : "";
      facts.push(el("span", {}, el("span", { class: "soft" }, `${field.name} `), shown + clip));
    }
    for (const found of one.findings) if (found.tokens.includes(t)) facts.push(el("span", { class: "wrong" }, found.check));
    $("token").replaceChildren(...facts);
  };
  const go = (pane, t) => {
    const made = pane.spans[t];
    if (!made) return;
    for (const old of $("reader").querySelectorAll(".now")) old.classList.remove("now");
    made.classList.add("now");
    const fold = made.closest("details");
    if (fold) fold.open = true;
    made.scrollIntoView({ block: "nearest" });
    state.token = [panes.indexOf(pane), t];
    inspect(pane, t);
  };

  // --- what the reader does -----------------------------------------------------------------------------------------
  const legend = () => {
    const field = state.field;
    $("legend").replaceChildren(...(field.kinds
      ? field.kinds.map(([kind, colour]) => { const box = el("i"); if (colour) box.style.background = `color-mix(in oklab, var(${colour}) 40%, transparent)`; return el("span", {}, box, kind); })
      : (() => {
        const bar = el("span", { class: "scale", role: "img", "aria-label": "colour scale" }), most = scaleOf(field), show = field.shown ?? ((v) => short(v));
        bar.style.background = `linear-gradient(to right, ${field.signed ? "color-mix(in oklab, var(--cold) 62%, transparent), transparent" : "transparent"}, color-mix(in oklab, var(--hot) 62%, transparent))`;
        const ends = field.signed ? [show(-most), show(most)] : ["0", (field.id === "engine" || field.id === "learner" ? "−" : "") + show(most)];
        return [el("span", {}, ends[0]), bar, el("span", {}, ends[1]), field.id === "ratio" ? el("span", {}, "red foot: clipped") : ""];
      })()));
  };
  const choose = (at, redraw = true) => {
    state.at = at;
    state.token = null;
    location.hash = `${at}`;
    mark();
    reader();
  };
  const colour = (field) => {
    state.field = field;
    $("field").value = field.id;
    legend();
    panes.forEach(paint);
  };
  const move = (by) => {
    const rows = [...$("list").querySelectorAll(".row")].map((each) => +each.dataset.at), now = rows.indexOf(state.at);
    const next = rows[Math.max(0, Math.min(rows.length - 1, now + by))];
    if (next !== undefined && next !== state.at) choose(next);
  };
  const step = (by) => {
    if (!panes.length) return;
    const [which, t] = state.token ?? [0, panes[0].one.prompt - 1], pane = panes[Math.min(which, panes.length - 1)];
    go(pane, Math.max(0, Math.min(pane.spans.length - 1, t + by)));
  };
  const KEYS = {
    j: () => move(1), k: () => move(-1), ArrowDown: () => move(1), ArrowUp: () => move(-1), ArrowRight: () => step(1), ArrowLeft: () => step(-1),
    c: () => colour(FIELDS[(FIELDS.indexOf(state.field) + 1) % FIELDS.length]),
    C: () => colour(FIELDS[(FIELDS.indexOf(state.field) + FIELDS.length - 1) % FIELDS.length]),
    f: () => { const folds = [...$("reader").querySelectorAll("details")], open = folds.some((fold) => !fold.open); folds.forEach((fold) => (fold.open = open)); },
    b: () => { const choices = ["", ...others(answers[state.at]).map((choice) => choice.id)]; state.beside = choices[(choices.indexOf(state.beside) + 1) % choices.length]; state.alone = !state.beside; reader(); },
    n: () => {
      const all = panes.flatMap((pane, p) => [...new Set(pane.one.findings.flatMap((found) => found.tokens))].sort((a, b) => a - b).map((t) => [p, t]));
      const [p, t] = state.token ?? [0, -1], next = all.find(([q, u]) => q > p || (q === p && u > t)) ?? all[0];
      if (next) go(panes[next[0]], next[1]);
    },
    "/": () => $("search").focus(), "?": () => $("help").click(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (KEYS[event.key]) { event.preventDefault(); KEYS[event.key](); }
  });
  for (const field of FIELDS) $("field").append(el("option", { value: field.id }, field.name));
  $("field").addEventListener("change", () => colour(FIELDS.find((field) => field.id === $("field").value)));
  for (const source of ["", ...new Set(groups.map((group) => group.data_source))]) $("source").append(el("option", { value: source }, source || "all"));
  for (const name of Object.keys(FILTERS)) {
    const count = answers.filter(FILTERS[name]).length;
    const chip = el("button", { type: "button", "aria-pressed": "false", onclick: () => {
      const on = !state.filters.delete(name) && state.filters.add(name);
      chip.setAttribute("aria-pressed", String(Boolean(on)));
      list();
    } }, `${name} ${count}`);
    if (!count) chip.hidden = true;
    $("chips").append(chip);
  }
  for (const id of ["source", "from", "to"]) $(id).addEventListener("input", list);
  let waiting = 0;
  $("search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(async () => {
      await Promise.all(data.steps.map(inflated));
      state.query = $("search").value.trim().toLowerCase();
      list();
      panes.forEach(paint);
    }, 120);
  });
  $("help").addEventListener("click", () => { $("keys").hidden = !$("keys").hidden; $("help").setAttribute("aria-expanded", String(!$("keys").hidden)); });
  for (const note of data.notes) $("notes").append(el("li", {}, note));
  if (!data.notes.length) $("notes").remove();
  const mixed = (one) => !one.skipped && one.group.trajectories.some((other) => other.score !== one.score); // it has a gradient
  const asked = location.hash.slice(1), first = [(one) => one.findings.length, (one) => one.group.flipped && mixed(one), mixed, (one) => one.turns > 1]
    .map((teaches) => answers.find(teaches)).find(Boolean);
  state.at = asked !== "" && +asked < answers.length ? +asked : (first ?? answers[0]).at;
  list();
  // The list is painted first; the numbers of the other steps are unpacked once it stands.
  reader().then(() => Promise.all(data.steps.map(inflated))).then(legend);
})();
