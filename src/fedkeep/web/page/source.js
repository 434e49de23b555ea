"use strict";
// Where updates come from: the server's stream, or the data inside a report.

class LiveSource {
  constructor(deliver, tell) {
    this.deliver = deliver;
    this.tell = tell;
    this.open();
  }

  open() {
    const events = new EventSource("api/stream");
    events.onopen = () => this.tell("live");
    events.onmessage = (event) => this.deliver(JSON.parse(event.data));
    events.onerror = () => {
      this.tell("lost");
      if (events.readyState === EventSource.CLOSED) setTimeout(() => this.open(), 2000);
    };
  }

  async device(key, device) {
    const answer = await fetch(`api/device?run=${encodeURIComponent(key)}&device=${device}`);
    return answer.ok ? answer.json() : null;
  }
}

class ReportSource {
  constructor(deliver, tell) {
    const { update, devices } = JSON.parse(byId("snapshot").textContent);
    this.devices = devices;
    deliver(update);
    tell("report");
  }

  async device(key, device) {
    return this.devices[key].find((snapshot) => snapshot.device === device) ?? null;
  }
}
