// One photograph at a time: dropped, pasted or chosen, sent to /search, and its neighbors shown.
(() => {
  const byId = (id) => document.getElementById(id);
  const [drop, file, state, answers, count] = ["drop", "file", "state", "answers", "k"].map(byId);
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

  function show(picture, results) {
    const address = URL.createObjectURL(picture);
    const query = make("figure", { className: "query" }, frame(address, "the query"), make("figcaption", {}, picture.name || "photograph"));
    answers.replaceChildren(make("section", { className: "found" }, query, make("ol", { className: "answers" }, ...results.map(tile))));
    const image = query.querySelector("img");
    image.addEventListener("load", () => URL.revokeObjectURL(address));
  }

  async function search(picture) {
    asked += 1;
    const mine = asked; // an answer that was overtaken by another search is not shown
    state.textContent = "Searching …";
    try {
      const response = await fetch(`/search?k=${encodeURIComponent(count.value)}`, {
        method: "POST", body: picture, headers: { "Content-Type": picture.type || "image/unknown" },
      });
      const found = await response.json();
      if (mine !== asked) return;
      const unknown = found.known === false ? "Unknown: no neighbor is near enough. The nearest are:" : "";
      state.textContent = response.ok ? unknown : found.error;
      if (response.ok) show(picture, found.results);
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
})();
