"use strict";
// Theme: the system's until the button is pressed. Pages opened from disk may have no storage.
const themed = []; // called after a change
function remembered(value) {
  try {
    if (value) localStorage.setItem("nearfar-theme", value);
    return localStorage.getItem("nearfar-theme");
  } catch {
    return null;
  }
}
const system = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
if (remembered()) document.documentElement.dataset.theme = remembered();
document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  remembered(document.documentElement.dataset.theme);
  themed.forEach((call) => call());
});
system.addEventListener("change", () => themed.forEach((call) => call()));
