// Switches between light, dark and the system's colours; the choice is stored in this browser.

const ORDER = ["", "light", "dark"];
const NAMES = { "": "◐ Auto", light: "○ Light", dark: "● Dark" };
const KEY = "adaponder-theme";

function stored() {
  try {
    return localStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** Makes a button switch the theme. */
export function startTheme(button) {
  let theme = ORDER.includes(stored()) ? stored() : "";
  const apply = () => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    button.textContent = NAMES[theme];
    button.setAttribute("aria-label", `Theme: ${theme || "system"}`);
  };
  button.addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // Storage is blocked: the choice lasts until the page is closed.
    }
    apply();
  });
  apply();
}
