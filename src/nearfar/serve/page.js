// One query at a time, a photograph (dropped, pasted or chosen) or a sentence: sent to /search, and its neighbors shown.
(() => {
  const byId = (id) => document.getElementById(id);
  const [drop, file, ask, sentence, state, answers, count] = ["drop", "file", "ask", "sentence", "state", "answers", "k"].map(byId);
  let asked = 0;

  function make(tag, settings, ...inside) {
    const found = Object.assign(document.createElement(tag), settings);
    found.append(...inside);
    return found;
  }

  function frame(address, name) {
    const found = make("span", { className: "frame" });
    if (!address) return found;
    const image = make("img", { src: address, alt: name });
    image.addEventListener("error", () => image.remove());
    found.append(image);
    return found;
  }

  function tile(answer) {
    const parts = [frame(answer.picture, answer.name), make("b", {}, answer.score.toFixed(3)), make("span", {}, answer.name)];
    if (answer.label !== null) parts.push(make("small", {}, answer.label));
    return make("li", {}, ...parts);
  }

  function show(asked, results) {
    const text = typeof asked === "string";
    const address = text ? null : URL.createObjectURL(asked);
    const shown = text ? [] : [frame(address, "the query")];
    const query = make("figure", { className: "query" }, ...shown, make("figcaption", {}, text ? asked : asked.name || "photograph"));
    answers.replaceChildren(make("section", { className: text ? "found texts" : "found" }, query, make("ol", { className: "answers" }, ...results.map(tile))));
    const image = query.querySelector("img");
    if (image) image.addEventListener("load", () => URL.revokeObjectURL(address));
  }

  async function search(query) {
    asked += 1;
    const mine = asked; // an answer that was overtaken by another search is not shown
    state.textContent = "Searching …";
    try {
      const response = await fetch(`/search?k=${encodeURIComponent(count.value)}`, {
        method: "POST", body: query, headers: { "Content-Type": typeof query === "string" ? "text/plain" : query.type || "image/unknown" },
      });
      const found = await response.json();
      if (mine !== asked) return;
      const unknown = found.known === false ? "Unknown: no neighbor is near enough. The nearest are:" : "";
      state.textContent = response.ok ? unknown : found.error;
      if (response.ok) show(query, found.results);
    } catch {
      if (mine === asked) state.textContent = "The server does not answer.";
    }
  }

  const take = (files) => { if (files.length) search(files[0]); };
  file.addEventListener("change", () => { take(file.files); file.value = ""; });
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", kind === "dragover");
      if (kind === "drop") take(event.dataTransfer.files);
    });
  }
  document.addEventListener("paste", (event) => take(event.clipboardData.files));
  ask.addEventListener("submit", (event) => { event.preventDefault(); search(sentence.value.trim()); });
})();
