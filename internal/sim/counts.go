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

// Count is how many messages there were, and their bytes without framing.
type Count struct {
	Messages int64 `json:"messages"`
	Bytes    int64 `json:"bytes"`
}

// Counts is what orchestrators have counted of nodes' calls and streams, by kind, such as "Register in" and "Follow out
// snapshot".
type Counts map[string]Count

// Kinds that are looked at apart from the others.
const (
	heartbeats = "Follow out heartbeat"    // they follow the clock and not what happens
	snapshots  = "Follow out snapshot"     // what a stream may begin with: all that its node has to know
	throttled  = "ListMappings over limit" // queries for mappings that were refused as too many: they are in "ListMappings in", too
	registered = "Register out"
	deltas     = "Follow out delta"
)

// Answers to queries for mappings.
const (
	pagesListed  = "ListMappings out"
	changesAsked = "ListMappings out changes"
)

// live is the orchestrator that there is, whatever stops and starts it, and what those before it have counted.
type live struct {
	mu      sync.Mutex
	server  *orchestrator.Server // nil for none; written by who plays events
	earlier Counts
}

// set has another one be it; before is what the last one has counted.
func (l *live) set(s *orchestrator.Server, before Counts) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.server, l.earlier = s, l.earlier.plus(before)
}

// read is what this one says of itself, with what all have counted.
func (l *live) read() (r said, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.server != nil {
		r, err = saidBy(l.server)
	}
	r.counts = l.earlier.plus(r.counts)
	return r, err
}

// said is what Prometheus is shown of an orchestrator.
type said struct {
	counts           Counts
	streams, waiting int64
}

func saidBy(s *orchestrator.Server) (r said, err error) {
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

// since is what has come to it, without kinds of which nothing has.
func (c Counts) since(before Counts) Counts {
	more := Counts{}
	for kind, n := range c {
		if d := (Count{n.Messages - before[kind].Messages, n.Bytes - before[kind].Bytes}); d != (Count{}) {
			more[kind] = d
		}
	}
	return more
}

// total is all but what is counted apart.
func (c Counts) total() (t Count) {
	for kind, n := range c {
		if kind != heartbeats && kind != throttled {
			t.Messages += n.Messages
			t.Bytes += n.Bytes
		}
	}
	return t
}

// Queries are those for mappings: by pages, and for what has changed.
type Queries struct {
	Pages     int64   `json:"pages"`   // answered
	Changes   int64   `json:"changes"` // answered
	Refused   int64   `json:"refused"` // as more than the orchestrator's --list-rate, and asked again
	PerSecond float64 `json:"perSecond"`
}

// queries are those of a time in seconds.
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

// valueOf is a counter, gauge, or the number of observations, of a metric without labels of this process.
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
