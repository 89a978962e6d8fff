// Lets the search run where a page is opened from the disk. Browsers start no worker there, so the
// worker's script runs in a hidden frame and receives its messages through the frame's window.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inner = frame.contentWindow
      inner.document.open()
      inner.document.write(
        "<script>" +
          "postMessage = message => parent.dispatchEvent(new CustomEvent('from-frame', {detail: message}));" +
          "importScripts = (...urls) => urls.reduce((done, url) => done.then(() => new Promise(load => {" +
          "const script = document.createElement('script'); script.src = url; script.onload = load;" +
          "document.body.appendChild(script)})), Promise.resolve())" +
          "</script>",
      )
      const script = inner.document.createElement("script")
      script.src = new URL(url, location.href)
      const loaded = new Promise(done => (script.onload = done))
      inner.document.close()
      ;(inner.document.body || inner.document.documentElement).appendChild(script)
      this.toFrame = message => loaded.then(() => inner.dispatchEvent(new MessageEvent("message", {data: message})))
      addEventListener("from-frame", event => {
        const message = new MessageEvent("message", {data: event.detail})
        this.dispatchEvent(message)
        if (this.onmessage) this.onmessage(message)
      })
    }
    postMessage(message) {
      this.toFrame(message)
    }
    terminate() {}
  }
}
