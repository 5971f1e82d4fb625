// Light or dark: what the system says, unless somebody chose. Runs before the first paint.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("drystone-theme"); } catch { /* no storage, no choice */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
