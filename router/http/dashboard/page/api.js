// What the page asks its router for. The admin key lives in this tab and leaves it as a header.

const KEY = "timestable-admin-key";
const PATIENCE_MS = 5000;

export class KeyWanted extends Error {}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const useKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

export async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch(path, {
    headers: key === null ? {} : { Authorization: `Bearer ${key}` },
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  if (answer.status === 401 || answer.status === 403) throw new KeyWanted();
  if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
  return answer.json();
}
