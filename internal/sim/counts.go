package sim

import (
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/orchestrator"
)

// Count is a number of messages and their size in bytes, without framing.
type Count struct {
	Messages int64 `json:"messages"`
	Bytes    int64 `json:"bytes"`
}

// Counts holds the orchestrators' counters for calls and streams of nodes, by kind of message, such as "Register in"
// and "Follow out snapshot".
type Counts map[string]Count

// Kinds of messages that are counted separately.
const (
	heartbeats = "Follow out heartbeat"    // they depend on the clock, not on events
	snapshots  = "Follow out snapshot"     // first message of a stream: the full state for its node
	throttled  = "ListMappings over limit" // queries for mappings over the rate limit; included in "ListMappings in"
	registered = "Register out"
	deltas     = "Follow out delta"
)

// Kinds of responses to queries for mappings.
const (
	pagesListed  = "ListMappings out"
	changesAsked = "ListMappings out changes"
)

// live refers to the current orchestrator, and holds the counters of earlier ones.
type live struct {
	mu      sync.Mutex
	server  *orchestrator.Server // nil while no orchestrator runs; written by the goroutine that plays events
	earlier Counts
}

// set replaces the orchestrator; before holds the counters of the earlier orchestrators.
func (l *live) set(s *orchestrator.Server, before Counts) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.server, l.earlier = s, l.earlier.plus(before)
}

// read returns the metrics of the current orchestrator, plus the counters of earlier ones.
func (l *live) read() (r serverMetrics, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.server != nil {
		r, err = readMetrics(l.server)
	}
	r.counts = l.earlier.plus(r.counts)
	return r, err
}

// serverMetrics holds an orchestrator's Prometheus metrics.
type serverMetrics struct {
	counts           Counts
	streams, waiting int64
}

func readMetrics(s *orchestrator.Server) (r serverMetrics, err error) {
	families, err := s.Gatherer().Gather()
	if err != nil {
		return r, err
	}
	c := Counts{}
	for _, f := range families {
		switch f.GetName() {
		case "pilaster_orchestrator_nodes_connected":
			r.streams = int64(f.GetMetric()[0].GetGauge().GetValue())
		case "pilaster_orchestrator_store_queue_length":
			r.waiting = int64(f.GetMetric()[0].GetGauge().GetValue())
		}
		for _, m := range f.GetMetric() {
			if f.GetName() == "pilaster_orchestrator_refused_total" && m.GetLabel()[0].GetValue() == "list-rate" {
				c[throttled] = Count{Messages: int64(m.GetCounter().GetValue())}
			}
			kind, ok := kindOf(m)
			if !ok {
				continue
			}
			of, value := c[kind], int64(m.GetCounter().GetValue())
			switch f.GetName() {
			case "pilaster_orchestrator_messages_total":
				of.Messages += value
			case "pilaster_orchestrator_message_bytes_total":
				of.Bytes += value
			default:
				continue
			}
			c[kind] = of
		}
	}
	r.counts = c
	return r, nil
}

func kindOf(m *dto.Metric) (string, bool) {
	labels := map[string]string{}
	for _, l := range m.GetLabel() {
		labels[l.GetName()] = l.GetValue()
	}
	name, ok := strings.CutPrefix(labels["procedure"], "/"+pilasterv1connect.NodeServiceName+"/")
	return strings.TrimSpace(name + " " + labels["direction"] + " " + labels["event"]), ok
}

func (c Counts) plus(d Counts) Counts {
	sum := maps.Clone(c)
	if sum == nil {
		sum = Counts{}
	}
	for kind, n := range d {
		sum[kind] = Count{sum[kind].Messages + n.Messages, sum[kind].Bytes + n.Bytes}
	}
	return sum
}

// since returns the difference to before, without kinds that did not change.
func (c Counts) since(before Counts) Counts {
	more := Counts{}
	for kind, n := range c {
		if d := (Count{n.Messages - before[kind].Messages, n.Bytes - before[kind].Bytes}); d != (Count{}) {
			more[kind] = d
		}
	}
	return more
}

// total returns the sum of all kinds, without those that are counted separately.
func (c Counts) total() (t Count) {
	for kind, n := range c {
		if kind != heartbeats && kind != throttled {
			t.Messages += n.Messages
			t.Bytes += n.Bytes
		}
	}
	return t
}

// Queries counts queries for mappings, for pages and for changes.
type Queries struct {
	Pages     int64   `json:"pages"`   // answered
	Changes   int64   `json:"changes"` // answered
	Refused   int64   `json:"refused"` // over the orchestrator's --list-rate, and retried
	PerSecond float64 `json:"perSecond"`
}

// queries counts the queries in a period whose length in seconds is long.
func (c Counts) queries(long float64) *Queries {
	q := Queries{Pages: c[pagesListed].Messages, Changes: c[changesAsked].Messages, Refused: c[throttled].Messages}
	if q == (Queries{}) {
		return nil
	}
	if long > 0 {
		q.PerSecond = float64(q.Pages+q.Changes) / long
	}
	return &q
}

func (c Counts) kinds() []string { return slices.Sorted(maps.Keys(c)) }

// valueOf returns the value of a counter or gauge of this process, or the number of observations of a histogram. The
// metric must have no labels.
func valueOf(name string) float64 {
	families, _ := prometheus.DefaultGatherer.Gather()
	for _, f := range families {
		if f.GetName() == name && len(f.GetMetric()) > 0 {
			m := f.GetMetric()[0]
			return m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return 0
}
