// Requests to the service that served this page. The session is a cookie that scripts cannot read.

export class Refused extends Error {
  constructor(status, error) {
    super(error.message || `the request failed with status ${status}`);
    this.status = status;
    this.hint = error.hint || "";
  }
}

async function ask(method, path, { query, body, signal } = {}) {
  const given = new URLSearchParams();
  for (const [key, value] of Object.entries(query || {})) {
    if (value !== null && value !== undefined && value !== "") given.append(key, value);
  }
  const text = given.toString();
  const headers = method === "GET" ? {} : { "X-Drystone": "1" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(text ? `${path}?${text}` : path, {
    method, headers, signal, credentials: "same-origin", cache: "no-store",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) {
    const { error } = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, error || {});
  }
  // Not caught: what was broken off in the middle is no answer.
  return answer.status === 204 ? {} : answer.json();
}

export const get = (path, query, signal) => ask("GET", path, { query, signal });
export const post = (path, body) => ask("POST", path, { body });
export const remove = (path) => ask("DELETE", path);
export const part = (text) => encodeURIComponent(text);

/** What is there, or null where it is not (yet). */
export async function maybe(path, query, signal) {
  try {
    return await get(path, query, signal);
  } catch (error) {
    if (error instanceof Refused && (error.status === 404 || error.status === 403)) return null;
    throw error;
  }
}
