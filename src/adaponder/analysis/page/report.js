const root = document.documentElement, button = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
const say = () => { button.textContent = dark() ? "Light page" : "Dark page"; };
button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; say(); });
system.addEventListener("change", say);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(part => { part.open = true; }));
button.hidden = false;
say();
