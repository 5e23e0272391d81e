// Light, dark, or as the system has it; remembered in this browser.

const ORDER = ["", "light", "dark"];
const NAMES = { "": "◐ Auto", light: "○ Light", dark: "● Dark" };
const KEY = "adaponder-theme";

function remembered() {
  try {
    return localStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** Makes a button the switch. */
export function startTheme(button) {
  let theme = ORDER.includes(remembered()) ? remembered() : "";
  const apply = () => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    button.textContent = NAMES[theme];
    button.setAttribute("aria-label", `Colours: ${theme || "as the system"}`);
  };
  button.addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // It holds until the page is closed.
    }
    apply();
  });
  apply();
}
