const root = document.documentElement, button = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
const setLabel = () => { button.textContent = dark() ? "Light theme" : "Dark theme"; };
button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; setLabel(); });
system.addEventListener("change", setLabel);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(details => { details.open = true; }));
button.hidden = false;
setLabel();
