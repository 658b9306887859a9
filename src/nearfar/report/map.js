// The map: points on a canvas, with two layouts, zoom, drag, a tip on the point that is nearest, and the same by keyboard.
(() => {
  const map = data.map;
  const total = map.rows.length;
  const COLOURS = ["#4e79a7", "#e5862d", "#d9534f", "#3fa39b", "#59a14f", "#c9a227", "#a06cb0", "#e377a2", "#8c6d5a", "#2fb4d9"];
  const GRID = 10000;
  const reduced = matchMedia("(prefers-reduced-motion: reduce)");
  const view = { zoom: 1, x: GRID / 2, y: GRID / 2 };
  let layout = map.tsne || map.pca;
  let current = layout.map((point) => [...point]);
  let active = -1; // the point under the pointer or the keyboard
  let pinned = -1; // the class chosen in the legend
  let width = 1, height = 1, unit = 1;

  const canvas = make("canvas", { tabindex: 0, role: "application",
    "aria-label": "Map of the samples. Arrow keys move from point to point, plus and minus zoom, 0 shows all, Enter opens a query." });
  const tip = make("div", { class: "tip", role: "status", hidden: "" });
  const hint = make("p", { class: "hint" }, "Drag to move. Click, then turn the wheel to zoom.");
  const pen = canvas.getContext("2d");
  const color = new Map(map.worst.map((group, i) => [group, i]));
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const toScreen = ([x, y]) => [width / 2 + (x - view.x) * unit * view.zoom, height / 2 - (y - view.y) * unit * view.zoom];

  // Five shapes and ten colors, so that classes differ by both.
  function mark(context, x, y, r, shape) {
    context.beginPath();
    if (shape === 0) context.arc(x, y, r, 0, 2 * Math.PI);
    else if (shape === 1) context.rect(x - r * 0.88, y - r * 0.88, r * 1.76, r * 1.76);
    else {
      const corners = [[3, -Math.PI / 2, 1.25], [4, 0, 1.2], [3, Math.PI / 2, 1.25]][shape - 2];
      for (let i = 0; i < corners[0]; i++) {
        const angle = corners[1] + (i * 2 * Math.PI) / corners[0];
        context.lineTo(x + r * corners[2] * Math.cos(angle), y + r * corners[2] * Math.sin(angle));
      }
      context.closePath();
    }
  }

  function paint(context, x, y, r, place, hollow, ground) {
    mark(context, x, y, r, place % 5);
    context.fillStyle = hollow ? ground : COLOURS[place];
    context.fill();
    context.strokeStyle = hollow ? COLOURS[place] : ground;
    context.lineWidth = hollow ? 1.7 : 0.8;
    context.stroke();
  }

  function draw() {
    const ratio = devicePixelRatio || 1;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const other = style("--other"), ground = style("--card"), ink = style("--ink");
    const r = Math.min(7, 2.6 * Math.sqrt(view.zoom) * (total > 1200 ? 1 : 1.25));
    const late = [];
    for (let i = 0; i < total; i++) {
      if (color.has(map.classes[i]) || map.classes[i] === pinned) { late.push(i); continue; }
      const [x, y] = toScreen(current[i]);
      pen.beginPath();
      pen.arc(x, y, r * 0.85, 0, 2 * Math.PI);
      if (map.nearest[i] === map.classes[i]) { pen.fillStyle = other; pen.fill(); } else { pen.strokeStyle = other; pen.lineWidth = 1; pen.stroke(); }
    }
    for (const i of late) {
      const [x, y] = toScreen(current[i]);
      pen.globalAlpha = pinned < 0 || pinned === map.classes[i] ? 1 : 0.16;
      const place = color.get(map.classes[i]);
      paint(pen, x, y, (pinned === map.classes[i] ? 1.9 : 1.5) * r, place, map.nearest[i] !== map.classes[i], ground);
    }
    pen.globalAlpha = 1;
    if (active >= 0) {
      const [x, y] = toScreen(current[active]);
      pen.beginPath();
      pen.arc(x, y, r * 2 + 4, 0, 2 * Math.PI);
      pen.strokeStyle = ink;
      pen.lineWidth = 2;
      pen.stroke();
    }
  }

  function resize() {
    const ratio = devicePixelRatio || 1;
    width = canvas.clientWidth || 1;
    height = canvas.clientHeight || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    unit = Math.min(width - 40, height - 76) / GRID;
    draw();
  }

  // The gallery's picture where it has one, else the point's tile of the atlas.
  function thumbnail(i) {
    if (data.pictures && data.pictures.data[map.rows[i]]) return make("i", { class: "pic" }, picture(map.rows[i]));
    if (!data.atlas) return null;
    const side = 64, across = data.atlas.across;
    const icon = make("i", { class: data.atlas.ink ? "inked" : "" });
    Object.assign(icon.style, { backgroundImage: `url(${data.atlas.uri})`, backgroundSize: `${across * side}px auto`,
      backgroundPosition: `-${(i % across) * side}px -${Math.floor(i / across) * side}px` });
    return icon;
  }

  function select(i) {
    active = i;
    tip.hidden = i < 0;
    if (i >= 0) {
      const right = map.nearest[i] === map.classes[i];
      const says = map.nearest[i] < 0 ? "lone: no other sample of its class"
        : right ? "✓ nearest is right" : `✕ nearest is ${data.classes[map.nearest[i]]}`;
      tip.replaceChildren(...[thumbnail(i), make("span", {}, make("b", {}, data.classes[map.classes[i]]), make("small", {}, map.names[i]),
        make("em", { class: right ? "right" : "" }, says),
        gallery.has(map.rows[i]) ? make("small", {}, "click or Enter: open in the gallery") : null)].filter(Boolean));
      const [x, y] = toScreen(current[i]);
      const left = x + 14 + tip.offsetWidth > width ? x - 14 - tip.offsetWidth : x + 14;
      tip.style.left = `${Math.max(4, left)}px`;
      tip.style.top = `${Math.max(4, Math.min(y + 14, height - tip.offsetHeight - 4))}px`;
    }
    draw();
  }

  function nearestTo(x, y, reach) {
    let best = -1, least = reach * reach;
    for (let i = 0; i < total; i++) {
      if (pinned >= 0 && map.classes[i] !== pinned) continue;
      const [px, py] = toScreen(current[i]);
      const distance = (px - x) ** 2 + (py - y) ** 2;
      if (distance < least) { least = distance; best = i; }
    }
    return best;
  }

  function zoom(by, x = width / 2, y = height / 2) {
    const before = view.zoom;
    view.zoom = Math.min(60, Math.max(0.8, before * by));
    const change = 1 / before - 1 / view.zoom;
    view.x += ((x - width / 2) / unit) * change;
    view.y -= ((y - height / 2) / unit) * change;
    select(active);
  }

  function reset() {
    Object.assign(view, { zoom: 1, x: GRID / 2, y: GRID / 2 });
    select(active);
  }

  // Move to the nearest point in a direction: ahead counts once, aside counts twice.
  function step(dx, dy) {
    if (active < 0) return select(nearestTo(width / 2, height / 2, Infinity));
    const [x, y] = toScreen(current[active]);
    let best = -1, least = Infinity;
    for (let i = 0; i < total; i++) {
      if (i === active || (pinned >= 0 && map.classes[i] !== pinned)) continue;
      const [px, py] = toScreen(current[i]);
      const ahead = (px - x) * dx + (py - y) * dy;
      const aside = Math.abs((px - x) * dy) + Math.abs((py - y) * dx);
      if (ahead > 0.01 && ahead + 2 * aside < least) { least = ahead + 2 * aside; best = i; }
    }
    if (best < 0) return undefined;
    const [bx, by] = toScreen(current[best]);
    if (bx < 20 || by < 20 || bx > width - 20 || by > height - 20) [view.x, view.y] = current[best];
    return select(best);
  }

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    if (drag) {
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      drag.moved ||= Math.abs(dx) + Math.abs(dy) > 3;
      if (!drag.moved) return;
      view.x -= dx / unit / view.zoom;
      view.y += dy / unit / view.zoom;
      Object.assign(drag, { x: event.clientX, y: event.clientY });
      select(active);
    } else {
      const found = nearestTo(event.clientX - box.left, event.clientY - box.top, 14);
      if (found !== active) select(found);
    }
  });
  canvas.addEventListener("pointerup", () => {
    if (drag && !drag.moved && active >= 0 && gallery.has(map.rows[active])) gallery.show(map.rows[active], canvas);
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", () => { if (!drag) select(-1); });
  canvas.addEventListener("wheel", (event) => {
    if (document.activeElement !== canvas && !event.ctrlKey) return; // the page scrolls on until the map is clicked
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY * 0.0016), event.clientX - box.left, event.clientY - box.top);
  }, { passive: false });
  canvas.addEventListener("focus", () => { hint.textContent = "Wheel or + and − zoom, arrow keys go from point to point, 0 shows all."; });
  canvas.addEventListener("blur", () => { hint.textContent = "Drag to move. Click, then turn the wheel to zoom."; });
  const keys = {
    ArrowRight: () => step(1, 0), ArrowLeft: () => step(-1, 0), ArrowUp: () => step(0, -1), ArrowDown: () => step(0, 1),
    "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4), 0: reset, Escape: () => select(-1),
    Enter: () => { if (active >= 0 && gallery.has(map.rows[active])) gallery.show(map.rows[active], canvas); },
  };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.metaKey || event.ctrlKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });

  // Turn one layout into the other.
  function change(name) {
    const from = current.map((point) => [...point]);
    layout = map[name];
    const start = performance.now();
    const frame = (now) => {
      const part = reduced.matches ? 1 : Math.min(1, (now - start) / 500);
      const eased = part * part * (3 - 2 * part);
      current = layout.map(([x, y], i) => [from[i][0] + (x - from[i][0]) * eased, from[i][1] + (y - from[i][1]) * eased]);
      select(active);
      if (part < 1) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  const tools = make("div", { class: "tools" });
  if (map.tsne) tools.append(choice("Layout", [["tsne", "t-SNE"], ["pca", "PCA"]], "tsne", change));
  for (const [text, label, act] of [["+", "Zoom in", () => zoom(1.4)], ["−", "Zoom out", () => zoom(1 / 1.4)], ["All", "Show all points", reset]]) {
    tools.append(make("button", { type: "button", class: "button", "aria-label": label, onclick: act }, text));
  }

  const legend = make("div", { class: "classes" }, make("h3", {}, map.worst.length < data.classes.length ? "The worst classes" : "Classes"));
  map.worst.forEach((group, place) => {
    const icon = make("canvas", { width: 28, height: 28, "aria-hidden": "true" });
    paint(icon.getContext("2d"), 14, 14, 9, place, false, "transparent");
    legend.append(make("button", { type: "button", "aria-pressed": "false", onclick: (event) => {
      pinned = pinned === group ? -1 : group;
      for (const button of legend.querySelectorAll("button")) button.setAttribute("aria-pressed", "false");
      event.currentTarget.setAttribute("aria-pressed", String(pinned === group));
      select(-1);
    } }, icon, data.pictures ? make("i", { class: "pic" }, picture(map.examples[place])) : null,
    make("span", { title: data.classes[group] }, data.classes[group])));
  });
  document.getElementById("map-body").append(make("div", { class: "board" },
    make("div", { class: "field" }, canvas, tools, hint, tip), legend));
  themed.push(draw);
  new ResizeObserver(resize).observe(canvas);
})();
