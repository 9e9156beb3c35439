package attack_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"os/exec"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

// monitor is a running `pilaster monitor --type drop` on a node.
type monitor struct {
	node  string
	lines chan string
}

const (
	// tryAgain is the interval of test events for a monitor that has not shown an event yet.
	tryAgain = 100 * time.Millisecond
	// patience is the timeout of expected output.
	patience = 10 * time.Second
)

// startMonitors starts a monitor with JSON output on n1 and a monitor with text output on n2. It returns when both have
// shown an event.
func (b *bed) startMonitors(t *testing.T) map[string]monitor {
	t.Helper()
	all := map[string]monitor{}
	for node, format := range map[string]string{"n1": "json", "n2": "text"} {
		ctx, cancel := context.WithCancel(b.ctx)
		out, in := io.Pipe()
		cmd := exec.CommandContext(ctx, labtest.Binary(t), "monitor", "--type", "drop", "-o", format)
		cmd.Stdout = in
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			in.CloseWithError(b.Run(node, cmd))
		}()
		m := monitor{node, make(chan string, 4096)}
		go func() {
			defer close(m.lines)
			for lines := bufio.NewScanner(out); lines.Scan(); {
				m.lines <- lines.Text()
			}
		}()
		t.Cleanup(func() { cancel(); <-ended })
		b.awaitMonitor(t, m, map[string]string{"n1": "b1", "n2": "b2"}[node])
		all[node] = m
	}
	return all
}

// awaitMonitor makes a container send listener reports, which the node drops, until the monitor shows a drop.
func (b *bed) awaitMonitor(t *testing.T, m monitor, sender string) {
	t.Helper()
	report := toGateway(packet.Packet{Source: b.container(t, sender).Address, Destination: b.container(t, "b3").Address,
		Body: packet.ICMP{Type: 143}}.Marshal())
	again := time.NewTicker(tryAgain)
	defer again.Stop()
	for {
		if err := b.inject[sender].Burst(1, func(int) []byte { return report }); err != nil {
			t.Fatal(err)
		}
		select {
		case line, open := <-m.lines:
			if !open || !strings.Contains(line, dropreason.MldIgnored.String()) {
				t.Fatalf("unexpected output of the monitor on %s: %q", m.node, line)
			}
			return
		case <-again.C:
		case <-b.ctx.Done():
			t.Fatalf("the monitor on %s shows no event: %v", m.node, context.Cause(b.ctx))
		}
	}
}

// event has the fields of a JSON line that the test needs.
type event struct {
	Type, Reason, Hook, Source, Destination, Endpoint string
	Count                                             uint64
}

// burst is the number of drops of one reason for which a node always sends events. After them it sends only a sample of
// the events, each with the number of packets for which it stands.
const burst = 32

// judgeMonitors checks the monitors' output. n1's monitor must have shown at least burst drops of each reason (or all,
// if there were fewer), not more than were sent, and the IDs of the sending containers. n2's text must have every
// reason.
func (b *bed) judgeMonitors(t *testing.T, monitors map[string]monitor) {
	due, left := map[string]uint64{}, map[string]uint64{}
	for key, n := range b.sent {
		if node, why, _ := strings.Cut(key, " "); node == "n1" && why != dropreason.MldIgnored.String() {
			due[why], left[why] = min(n, burst), n
		}
	}
	names := map[string]bool{}
	for _, c := range b.Containers() {
		names[b.ContainerID(c.Name)] = true
	}
	for line := range b.shown(t, monitors["n1"], func() bool { return len(due) == 0 }) {
		var e event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if e.Type != "drop" || e.Count == 0 || e.Hook == "container" && !names[e.Endpoint] {
			t.Errorf("unexpected event %s", line)
		}
		if e.Reason != dropreason.MldIgnored.String() && e.Count > left[e.Reason] {
			t.Errorf("got an event for %d packets of %s, %d more than were dropped",
				e.Count, e.Reason, e.Count-left[e.Reason])
		}
		left[e.Reason] -= e.Count
		if due[e.Reason] <= e.Count {
			delete(due, e.Reason)
		} else {
			due[e.Reason] -= e.Count
		}
	}
	if len(due) > 0 {
		t.Errorf("n1's monitor did not show %v", due)
	}

	text := map[string]bool{}
	for key := range b.sent {
		if node, why, _ := strings.Cut(key, " "); node == "n2" {
			text[why] = true
		}
	}
	for line := range b.shown(t, monitors["n2"], func() bool { return len(text) == 0 }) {
		for why := range text {
			if strings.Contains(line, "  "+why+" ") {
				delete(text, why)
			}
		}
	}
	if len(text) > 0 {
		t.Errorf("n2's monitor did not show %v", text)
	}
}

// shown yields a monitor's lines until enough returns true.
func (b *bed) shown(t *testing.T, m monitor, enough func() bool) func(func(string) bool) {
	return func(yield func(string) bool) {
		for !enough() {
			select {
			case line, open := <-m.lines:
				if !open {
					t.Errorf("the monitor on %s ended", m.node)
					return
				}
				if !yield(line) {
					return
				}
			case <-b.ctx.Done():
				return
			}
		}
	}
}
