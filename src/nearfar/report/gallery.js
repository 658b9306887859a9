// The gallery: queries with what they found, twelve at a time; a filter; and a larger view of one query.
const gallery = (() => {
  const PAGE = 12;
  const failures = data.queries.filter((query) => query.rank > 1).length;
  const state = { text: "", kind: failures ? "failures" : "all", page: 0, active: 0, open: -1, from: null };
  const list = make("ol", { class: "queries" });
  const count = make("p", { class: "count", role: "status" });
  const pager = make("div", { class: "pager" });
  const detail = document.getElementById("detail");
  let shown = [];

  const isRight = (query, row) => data.samples[row][0] === data.samples[query.row][0];
  const fixed = (score) => score.toFixed(3);
  const ordinal = (query) => (query.rank === 1 ? "right at once" : `first right answer at rank ${query.rank.toLocaleString("en")}`);

  function card(query, place) {
    const right = query.rank === 1;
    const strip = make("span", { class: "strip" },
      ...query.near.map((row, i) => tile(row, isRight(query, row), fixed(query.scores[i]))));
    if (query.rank > query.near.length) {
      strip.append(make("span", { class: "first-right" }, tile(query.right, true, `#${query.rank}`)));
    }
    return make("li", {}, make("button", {
      type: "button", class: "query", "data-place": place, tabindex: place === state.active ? 0 : -1,
      "aria-label": `Query ${place + 1}: ${className(query.row)}, ${sampleName(query.row)}; ${ordinal(query)}. Open.`,
      onclick: () => { state.active = place; open(place); },
    },
    tile(query.row),
    make("span", { class: "says" },
      make("b", {}, className(query.row)),
      make("small", {}, sampleName(query.row)),
      make("span", { class: right ? "verdict right" : "verdict" }, `${right ? "✓" : "✕"} ${ordinal(query)}`)),
    strip));
  }

  function draw() {
    const wanted = state.text.trim().toLowerCase();
    shown = data.queries.filter((query) => (state.kind === "all" || query.rank > 1)
      && (!wanted || className(query.row).toLowerCase().includes(wanted) || sampleName(query.row).toLowerCase().includes(wanted)));
    const pages = Math.max(1, Math.ceil(shown.length / PAGE));
    state.page = Math.min(state.page, pages - 1);
    state.active = Math.min(Math.max(state.active, state.page * PAGE), Math.min(shown.length, (state.page + 1) * PAGE) - 1);
    const here = shown.slice(state.page * PAGE, (state.page + 1) * PAGE);
    list.replaceChildren(...here.map((query, i) => card(query, state.page * PAGE + i)));
    count.textContent = shown.length === 1 ? "1 query" : `${shown.length} queries`;
    if (!here.length) list.append(make("li", { class: "quiet" }, "No query here fits the filter."));
    const turn = (by, text) => {
      const button = make("button", { type: "button", class: "button", onclick: () => { state.page += by; state.active = 0; draw(); } }, text);
      button.disabled = state.page + by < 0 || state.page + by >= pages;
      return button;
    };
    pager.replaceChildren(turn(-1, "Previous"), make("span", {}, `Page ${state.page + 1} of ${pages}`), turn(1, "Next"));
    pager.hidden = pages === 1;
  }

  // Put the focus on a query, turning the page if it is on another one.
  function focus(place) {
    if (place < 0 || place >= shown.length) return;
    state.active = place;
    state.page = Math.floor(place / PAGE);
    draw();
    list.querySelector(`[data-place="${place}"]`).focus();
  }

  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  list.addEventListener("keydown", (event) => {
    const place = Number(event.target.dataset.place);
    const to = event.key === "Home" ? 0 : event.key === "End" ? shown.length - 1 : place + steps[event.key];
    if (Number.isNaN(to)) return;
    event.preventDefault();
    focus(to);
  });

  function answer(query, row, score, rank) {
    const right = isRight(query, row);
    return make("li", { class: right ? "is-right" : "" }, tile(row, right),
      make("span", { class: "place" }, make("em", {}, right ? "✓ right" : "✕ wrong"), `#${rank.toLocaleString("en")} · ${fixed(score)}`),
      make("b", {}, className(row)), make("small", {}, sampleName(row)));
  }

  function story(query) {
    if (query.rank === 1) {
      const lead = query.gap === null ? "" : ` It leads the best wrong answer by ${fixed(-query.gap)}.`;
      return `The nearest is right, with a score of ${fixed(query.rightScore)}.${lead}`;
    }
    return `The nearest is of class ${className(query.near[0])} and scores ${fixed(query.scores[0])}. The first right answer comes at rank `
      + `${query.rank.toLocaleString("en")} with ${fixed(query.rightScore)}: a gap of ${fixed(query.gap)}.`;
  }

  function open(place) {
    const query = shown[place];
    if (!query) return;
    state.open = place;
    const move = (by, text, label) => {
      const button = make("button", { type: "button", class: "button", "aria-label": label, onclick: () => open(place + by) }, text);
      button.disabled = !shown[place + by];
      return button;
    };
    const close = make("button", { type: "button", class: "button", onclick: () => detail.close() }, "Close");
    const answers = query.near.map((row, i) => answer(query, row, query.scores[i], i + 1));
    if (query.rank > query.near.length) answers.push(answer(query, query.right, query.rightScore, query.rank));
    detail.replaceChildren(
      make("div", { class: "bar-top" }, make("p", {}, `Query ${place + 1} of ${shown.length}`),
        move(-1, "←", "Previous query"), move(1, "→", "Next query"), close),
      make("div", { class: "inside" },
        make("div", { class: "asks" }, tile(query.row), make("h2", { id: "detail-title" }, className(query.row)),
          make("small", {}, sampleName(query.row)), make("p", { class: "story" }, story(query))),
        make("ol", { class: "answers" }, ...answers)));
    if (!detail.open) detail.showModal();
    close.focus();
  }

  detail.addEventListener("keydown", (event) => {
    const by = steps[event.key];
    if (!by || !shown[state.open + by]) return;
    event.preventDefault();
    open(state.open + by);
  });
  detail.addEventListener("click", (event) => { if (event.target === detail) detail.close(); });
  detail.addEventListener("close", () => { // the focus goes back to where it came from
    if (state.from) state.from.focus({ preventScroll: true });
    else focus(state.open);
    state.from = null;
  });

  const names = [...new Set(data.queries.map((query) => className(query.row)))].sort();
  const input = make("input", { type: "search", id: "filter", list: "filter-names", placeholder: "Filter by class or name",
    "aria-label": "Filter the queries by class or name", autocomplete: "off",
    oninput: () => { state.text = input.value; state.page = 0; state.active = 0; draw(); } });
  const kinds = choice("Which queries", [["failures", `Failures (${failures})`], ["all", `All (${data.queries.length})`]], state.kind,
    (kind) => { state.kind = kind; state.page = 0; state.active = 0; draw(); });
  document.getElementById("gallery-body").append(
    make("div", { class: "controls" }, input, make("datalist", { id: "filter-names" }, ...names.map((name) => make("option", { value: name }))), kinds, count),
    list, pager);

  // Show the queries of one class.
  function pick(name) {
    input.value = state.text = name;
    state.kind = "all";
    press(kinds, "all");
    state.page = state.active = 0;
    draw();
    document.getElementById("gallery").scrollIntoView({ behavior: "instant" });
    input.focus({ preventScroll: true });
  }
  for (const button of document.querySelectorAll(".pick")) button.addEventListener("click", () => pick(button.dataset.class));
  draw();

  // Open the query of a row, if the gallery has it; used by the map.
  return {
    has: (row) => data.queries.some((query) => query.row === row),
    show(row, from) {
      state.text = input.value = "";
      state.kind = "all";
      press(kinds, "all");
      draw();
      open(shown.findIndex((query) => query.row === row));
      state.from = from;
    },
  };
})();
