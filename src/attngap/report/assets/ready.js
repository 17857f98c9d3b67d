// Says so when every chart is drawn.
await Promise.all([...drawn.values()]);
document.documentElement.setAttribute("data-ready", "");
