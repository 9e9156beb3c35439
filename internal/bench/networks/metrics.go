package networks

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/unixrpc"
)

// reading is what the orchestrator and an agent count.
type reading struct {
	messages  Messages       // of the orchestrator, since its start
	tables    map[string]int // of the agent's node, read from the kernel or from Open vSwitch
	connected bool
}

// Messages are messages that the orchestrator exchanged with nodes, without heartbeats.
type Messages struct {
	Stream float64 `json:"stream"` // to nodes, on their streams
	Calls  float64 `json:"calls"`  // calls of nodes and their answers, and reports on streams
}

func (m Messages) since(b Messages) Messages { return Messages{m.Stream - b.Stream, m.Calls - b.Calls} }

func (m Messages) plus(o Messages) Messages { return Messages{m.Stream + o.Stream, m.Calls + o.Calls} }

func (m Messages) over(n int) Messages { return Messages{m.Stream / float64(n), m.Calls / float64(n)} }

// meter reads the metrics of an orchestrator and of one agent.
type meter struct {
	orchestrator, agent *http.Client
	look                time.Duration // time between two readings that must be equal
}

func newMeter(orchestrator, agent string, look time.Duration) *meter {
	return &meter{unixrpc.Client(orchestrator), unixrpc.Client(agent), look}
}

// settleTime bounds how long messages may be in transit.
const settleTime = 2 * time.Minute

// Readings that must be equal: after an event whose messages were awaited, and before the first event.
const (
	once   = 2
	surely = 5
)

// quiet waits until so many readings in a row are equal: no more messages are sent, and the node's tables do not
// change.
func (m *meter) quiet(ctx context.Context, readings int) (reading, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, settleTime,
		errors.New("the counters of orchestrator and agent do not settle"))
	defer cancel()
	last, err := m.read(ctx)
	for equal := 1; err == nil && (equal < readings || !last.connected); {
		select {
		case <-time.After(m.look):
		case <-ctx.Done():
			return last, context.Cause(ctx)
		}
		var now reading
		if now, err = m.read(ctx); err == nil && now.connected == last.connected && now.messages == last.messages &&
			maps.Equal(now.tables, last.tables) {
			equal++
		} else {
			equal = 1
		}
		last = now
	}
	return last, err
}

// awaitTime bounds how long expected messages and entries are awaited. Their absence is a result and no error.
const awaitTime = 30 * time.Second

// await waits until a reading is as expected, and then until it does not change any more.
func (m *meter) await(ctx context.Context, readings int, expected func(reading) bool) (reading, error) {
	for end := time.Now().Add(awaitTime); time.Now().Before(end); {
		now, err := m.read(ctx)
		if err != nil {
			return now, err
		}
		if expected(now) {
			break
		}
		select {
		case <-time.After(m.look / 4):
		case <-ctx.Done():
			return now, context.Cause(ctx)
		}
	}
	return m.quiet(ctx, readings)
}

func (m *meter) read(ctx context.Context) (r reading, err error) {
	r.tables = map[string]int{}
	err = scrape(ctx, m.orchestrator, func(name, labels string, v float64) {
		if name != "pilaster_orchestrator_messages_total" || strings.Contains(labels, `event="heartbeat"`) {
			return
		}
		if strings.Contains(labels, `direction="out"`) && strings.Contains(labels, "/Follow") {
			r.messages.Stream += v
		} else {
			r.messages.Calls += v
		}
	})
	if err != nil {
		return r, fmt.Errorf("metrics of the orchestrator: %w", err)
	}
	err = scrape(ctx, m.agent, func(name, labels string, v float64) {
		switch name {
		case "pilaster_orchestrator_connected":
			r.connected = v == 1
		case "pilaster_table_entries":
			r.tables[strings.TrimSuffix(strings.TrimPrefix(labels, `table="`), `"`)] = int(v)
		}
	})
	if err != nil {
		return r, fmt.Errorf("metrics of the agent: %w", err)
	}
	return r, nil
}

// scrape calls use for each metric of a daemon.
func scrape(ctx context.Context, daemon *http.Client, use func(name, labels string, v float64)) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, unixrpc.URL+"/metrics", nil)
	if err != nil {
		return err
	}
	resp, err := daemon.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("it answered %s", resp.Status)
	}
	return parse(resp.Body, use)
}

// parse reads Prometheus text.
func parse(page io.Reader, use func(name, labels string, v float64)) error {
	lines := bufio.NewScanner(page)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		at := strings.LastIndexByte(line, ' ')
		if at < 0 || line[0] == '#' {
			continue
		}
		name, labels, _ := strings.Cut(strings.TrimSuffix(line[:at], "}"), "{")
		if !strings.HasPrefix(name, "pilaster_") {
			continue
		}
		v, err := strconv.ParseFloat(line[at+1:], 64)
		if err != nil {
			return fmt.Errorf("unexpected line: %q", line)
		}
		use(name, labels, v)
	}
	return lines.Err()
}

// Table is the growth of one table.
type Table struct {
	Name    string `json:"name"`
	Entries int    `json:"entries"`
}
