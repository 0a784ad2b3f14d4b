"use strict";
(() => {
  const stored = document.getElementById("answers");
  if (!stored) return;
  const data = JSON.parse(stored.textContent);
  const meaning = JSON.parse(document.getElementById("meaning").textContent);
  const KINDS = { f: "first", a: "accepted", c: "corrected", b: "bonus", t: "target" };
  const at = (id) => document.getElementById(`tv-${id}`);
  const card = at("card"), text = at("text");
  const state = { question: 0, temperature: null, cell: null, turn: 0, token: -1, isByOdds: false };

  function make(tag, attributes = {}, ...children) {
    const isSvg = tag === "svg" || tag === "rect" || tag === "title";
    const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
      : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  // What cannot be seen gets a mark; a token without any text is a box.
  const visible = (piece) =>
    piece.replace(/\r\n|\n/g, "↵").replace(/\t/g, "→").replace(/ /g, "·") || "▯";
  const percent = (p) => (p === null || p === undefined ? "–" : p >= 0.0995 ? `${Math.round(p * 100)} %`
    : p >= 0.001 ? `${(p * 100).toFixed(1)} %` : "< 0.1 %");

  function roundsOf(turn) {
    const rounds = [];
    [...turn.kinds].forEach((kind, i) => {
      if (turn.offered[i] >= 0) rounds.push({ begin: i, end: i + 1, offered: turn.offered[i] });
      else if (rounds.length) rounds[rounds.length - 1].end = i + 1;
    });
    return rounds;
  }

  const unitsOf = () => data.units.filter((unit) =>
    unit.question === state.question && data.cells[unit.cell].temperature === state.temperature);
  const unitNow = () => unitsOf().find((unit) => unit.cell === state.cell);
  const turnNow = () => unitNow().turns[state.turn];

  // The state always names something that exists.
  function settle() {
    const of = data.units.filter((unit) => unit.question === state.question);
    const known = of.map((unit) => data.cells[unit.cell].temperature);
    if (!known.includes(state.temperature)) state.temperature = Math.min(...known);
    const units = unitsOf();
    if (!units.some((unit) => unit.cell === state.cell)) {
      const passes = (unit) => roundsOf(unit.turns[0]).length || Infinity;
      state.cell = units.reduce((a, b) => (passes(b) < passes(a) ? b : a)).cell;
    }
    state.turn = Math.min(state.turn, unitNow().turns.length - 1);
    state.token = -1;
  }

  function buttons(box, values, chosen, label, choose) {
    box.replaceChildren();
    if (values.length < 2) return;
    for (const value of values) {
      const button = make("button", { type: "button", "aria-pressed": String(value === chosen) },
        label(value));
      button.addEventListener("click", () => { choose(value); show(); });
      box.append(button);
    }
  }

  function strip(turn, columns, height) {
    const rounds = roundsOf(turn);
    const svg = make("svg", { viewBox: `0 0 ${columns * 10} ${height * 10}`, height: height * 7,
      preserveAspectRatio: "none", role: "img",
      "aria-label": `${rounds.length} passes of the target` });
    rounds.forEach((round, n) => {
      const square = (level, attributes) => svg.append(make("rect", { x: n * 10 + 1,
        y: (height - level - 1) * 10 + 1, width: 8, height: 8.6, "data-round": n, ...attributes }));
      for (let i = round.begin; i < round.end; i++) {
        const kind = KINDS[turn.kinds[i]];
        square(i - round.begin, { class: "sq", fill: `rgb(var(--${kind}))` });
      }
      const used = [...turn.kinds.slice(round.begin, round.end)].filter((k) => k === "a").length;
      for (let level = used; level < round.offered; level++) {
        const isRejected = level === used && turn.rejected[round.end - 1] !== undefined;
        square(level + 1, isRejected ? { class: "sq", fill: "rgb(var(--rejected) / .75)" }
          : { class: "sq unused" });
      }
    });
    return svg;
  }

  function showCells() {
    const units = unitsOf().filter((unit) => unit.turns[state.turn]);
    const counts = units.map((unit) => roundsOf(unit.turns[state.turn]).length);
    const columns = Math.max(...counts, 1);
    at("cells").replaceChildren(...units.map((unit, n) => {
      const turn = unit.turns[state.turn], isOn = unit.cell === state.cell;
      const height = 1 + Math.max(1, ...roundsOf(turn).map((r) => Math.max(r.offered, r.end - r.begin - 1)));
      const emitted = turn.kinds.length - turn.kinds.split("f").length + 1;
      const time = turn.ms === null ? "" : ` · ${turn.ms.toPrecision(3)} ms`;
      const row = make("div", { class: "strip", role: "radio", "aria-checked": String(isOn),
        tabindex: isOn ? 0 : -1 }, make("b", {}, data.cells[unit.cell].label),
        strip(turn, columns, Math.min(height, 12)),
        make("i", {}, `${counts[n]} passes · tau ${(emitted / Math.max(counts[n], 1)).toFixed(2)}${time}`));
      row.addEventListener("click", () => { state.cell = unit.cell; show(); });
      row.addEventListener("keydown", (event) => {
        const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        state.cell = units[(n + step + units.length) % units.length].cell;
        show();
        at("cells").querySelector("[aria-checked=true]").focus();
      });
      row.addEventListener("mouseover", (event) => mark(isOn ? event.target.dataset?.round : null));
      row.addEventListener("mouseleave", () => mark(null));
      return row;
    }));
  }

  // Underlines the tokens of a round, and outlines its squares.
  function mark(round) {
    for (const span of text.querySelectorAll(".t")) {
      span.classList.toggle("same", round !== null && round !== undefined && span.dataset.round === String(round));
    }
    for (const square of at("cells").querySelectorAll("[aria-checked=true] .sq")) {
      square.classList.toggle("on", round !== null && square.dataset.round === String(round));
    }
  }

  function showText() {
    const turn = turnNow(), { pieces } = data.texts[turn.text], found = [];
    let round = -1;
    [...turn.kinds].forEach((letter, i) => {
      const kind = KINDS[letter], piece = pieces[i];
      const isStart = turn.offered[i] >= 0;
      if (isStart) round += 1;
      if (turn.rejected[i] !== undefined) {
        found.push(make("del", { title: meaning.rejected }, visible(turn.rejected[i])));
      }
      const span = make("span", { class: `t ${kind}${isStart ? " start" : ""}`, id: `tv-t${i}`,
        style: `--c:var(--${kind})`, "data-token": i, "data-round": round });
      if (piece.trim()) span.append(piece);
      else span.append(make("span", { class: "ghost" }, visible(piece).replace(/↵/g, "↵\n")));
      const p = data.texts[turn.text].probs?.[i];
      if (p !== undefined && p !== null) span.style.setProperty("--p", p);
      found.push(span);
    });
    text.replaceChildren(...found);
    text.classList.toggle("by-odds", state.isByOdds);
    const left = turn.total - turn.kinds.length;
    at("note").textContent = [turn.finish && `ends by: ${turn.finish}`,
      left > 0 && `${left.toLocaleString("en")} tokens more are left out`].filter(Boolean).join(" · ");
  }

  function showLegend() {
    const turn = turnNow(), count = (letter) => turn.kinds.split(letter).length - 1;
    const counts = Object.entries(KINDS).map(([letter, kind]) => [kind, count(letter)]);
    counts.push(["rejected", Object.keys(turn.rejected).length]);
    const entries = counts.filter(([, n]) => n).map(([kind, n]) => {
      const name = make(kind === "rejected" ? "del" : "span", { class: "chip",
        style: `background:rgb(var(--${kind}) / .3)` }, kind);
      return make("span", {}, name, ` ${n} · ${meaning[kind]}`);
    });
    if (at("cells").querySelector(".unused")) {
      entries.push(make("span", {}, make("span", { class: "chip hollow" }, "unused"),
        " · drafted after a rejected token, and not looked at"));
    }
    if (state.isByOdds) {
      const chips = [1, 0.5, 0.1, 0].map((p) => make("span", { class: "chip",
        style: `background:rgb(var(--corrected) / ${0.75 * (1 - p)})` }, percent(p)));
      entries.push(make("span", {}, ...chips, " · in the text: how probable the target found it"));
    }
    at("legend").replaceChildren(...entries);
  }

  function odds(turn, i) {
    const { probs, alternatives, pieces } = data.texts[turn.text];
    if (!probs || probs[i] === null || probs[i] === undefined) return [];
    const rows = (alternatives[i] || []).map(([piece, p]) => [piece, p, false]);
    const own = rows.find(([piece, p]) => piece === pieces[i] && Math.abs(p - probs[i]) < 2e-4);
    if (own) own[2] = true;
    else rows.push([pieces[i], probs[i], true]);
    const grid = make("div", { class: "odds" });
    for (const [piece, p, isTaken] of rows) {
      grid.append(make("code", {}, visible(piece)), make("span", { class: isTaken ? "taken" : "",
        style: `width:${Math.max(p || 0, 0.004) * 100}%` }), make("i", {}, percent(p)));
    }
    return [make("p", { class: "soft" }, "the target's probabilities here"), grid];
  }

  function showCard(i) {
    text.querySelector(".t.on")?.classList.remove("on");
    state.token = i;
    card.hidden = i < 0;
    if (i < 0) return mark(null);
    const turn = turnNow(), { ids, pieces } = data.texts[turn.text];
    const span = at(`t${i}`), round = Number(span.dataset.round), kind = KINDS[turn.kinds[i]];
    span.classList.add("on");
    mark(round >= 0 ? round : null);
    const where = roundsOf(turn)[round];
    const drafted = where && where.offered ? `, ${kind === "accepted" ? "draft" : "after draft"} `
      + `${i - where.begin + (kind === "accepted" ? 1 : 0)} of ${where.offered}` : "";
    const lines = [make("p", {}, make("code", {}, visible(pieces[i])), ` `, make("span", { class: "chip",
      style: `background:rgb(var(--${kind}) / .3);border-radius:4px;padding:0 .35em` }, kind)),
      make("p", { class: "soft" }, meaning[kind]),
      make("p", { class: "soft" }, `token ${i + 1}, id ${ids[i] ?? "–"}${round >= 0 ? `; pass ${round + 1}${drafted}` : ""}`)];
    if (turn.rejected[i] !== undefined) {
      lines.push(make("p", {}, "in place of ", make("del", {}, visible(turn.rejected[i]))));
    }
    card.replaceChildren(...lines, ...odds(turn, i));
    const box = span.getClientRects()[0] || span.getBoundingClientRect();
    const left = Math.min(box.left, document.documentElement.clientWidth - card.offsetWidth - 12);
    const isBelow = box.bottom + card.offsetHeight + 14 < window.innerHeight || box.top < card.offsetHeight + 14;
    const top = isBelow ? box.bottom + 8 : box.top - card.offsetHeight - 8;
    card.style.left = `${Math.max(12, left) + window.scrollX}px`;
    card.style.top = `${top + window.scrollY}px`;
  }

  function show() {
    settle();
    const temperatures = [...new Set(data.units.filter((unit) => unit.question === state.question)
      .map((unit) => data.cells[unit.cell].temperature))];
    at("question").value = String(state.question);
    buttons(at("temperature"), temperatures, state.temperature,
      (t) => (t === 0 ? "greedy" : `T = ${t}`), (t) => { state.temperature = t; });
    const turns = unitNow().turns.map((_, i) => i);
    buttons(at("turn"), turns, state.turn, (i) => `turn ${i + 1}`, (i) => { state.turn = i; });
    buttons(at("colour"), data.texts[turnNow().text].probs ? [false, true] : [], state.isByOdds,
      (isOn) => (isOn ? "by surprise" : "by origin"), (isOn) => { state.isByOdds = isOn; });
    const prompt = data.prompts[turnNow().prompt];
    at("prompt").textContent = prompt.text;
    at("prompt-size").textContent = prompt.tokens ? `, ${prompt.tokens.toLocaleString("en")} tokens` : "";
    showCells();
    showLegend();
    showText();
    showCard(-1);
  }

  const tokenOf = (event) => event.target.closest?.("[data-token]");
  text.addEventListener("mouseover", (event) => {
    const span = tokenOf(event);
    if (span) showCard(Number(span.dataset.token));
  });
  text.addEventListener("mouseleave", () => showCard(-1));
  text.addEventListener("click", (event) => {
    const span = tokenOf(event);
    if (span) showCard(Number(span.dataset.token));
  });
  text.addEventListener("focusout", () => showCard(-1));
  text.addEventListener("keydown", (event) => {
    const last = turnNow().kinds.length - 1;
    const to = { ArrowRight: state.token + 1, ArrowLeft: state.token - 1, Home: 0, End: last,
      Escape: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    showCard(event.key === "Escape" ? -1 : Math.max(0, Math.min(last, to)));
    if (state.token >= 0) at(`t${state.token}`).scrollIntoView({ block: "nearest" });
  });

  const groups = {};
  data.questions.forEach((question, i) => (groups[question.category] ??= []).push([question, i]));
  for (const [category, members] of Object.entries(groups)) {
    const options = members.map(([question, i]) => make("option", { value: i }, question.id));
    if (category) at("question").append(make("optgroup", { label: category }, ...options));
    else at("question").append(...options);
  }
  at("question").addEventListener("change", (event) => {
    state.question = Number(event.target.value);
    state.turn = 0;
    show();
  });
  document.querySelector("#tokens .view").hidden = false;
  show();
})();
