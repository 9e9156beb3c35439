package control

import (
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
)

// MessageCounter counts messages of the orchestrator to this node.
type MessageCounter struct{ messages, bytes *prometheus.CounterVec }

// Kinds of messages on the stream; for other calls the procedure is enough.
const (
	eventSnapshot  = "snapshot"
	eventDelta     = "delta"
	eventHeartbeat = "heartbeat"
	eventOther     = "other" // sent by a newer orchestrator
)

// NewMessageCounter returns a counter at 0.
func NewMessageCounter() MessageCounter {
	counter := func(name, help string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(
			prometheus.CounterOpts{Name: "pilaster_agent_" + name, Help: help},
			[]string{"procedure", "event"},
		)
		for _, event := range []string{eventSnapshot, eventDelta, eventHeartbeat} {
			c.WithLabelValues(pilasterv1connect.NodeServiceFollowProcedure, event) // present from the start, at 0
		}
		return c
	}
	return MessageCounter{
		counter(
			"received_messages_total",
			"Messages from the orchestrator, by procedure, and on the stream by kind of event.",
		),
		counter("received_message_bytes_total", "Bytes of these messages, without framing, headers and TLS."),
	}
}

// Count counts one message of a procedure.
func (r MessageCounter) Count(procedure string, message any) {
	event := ""
	if f, ok := message.(*pilasterv1.FollowResponse); ok {
		switch f.Event.(type) {
		case *pilasterv1.FollowResponse_Snapshot:
			event = eventSnapshot
		case *pilasterv1.FollowResponse_Delta:
			event = eventDelta
		case *pilasterv1.FollowResponse_Heartbeat:
			event = eventHeartbeat
		default:
			event = eventOther
		}
	}
	r.messages.WithLabelValues(procedure, event).Inc()
	if m, ok := message.(proto.Message); ok {
		r.bytes.WithLabelValues(procedure, event).Add(float64(proto.Size(m)))
	}
}

// Describe implements prometheus.Collector.
func (r MessageCounter) Describe(ch chan<- *prometheus.Desc) {
	r.messages.Describe(ch)
	r.bytes.Describe(ch)
}

// Collect implements prometheus.Collector.
func (r MessageCounter) Collect(ch chan<- prometheus.Metric) {
	r.messages.Collect(ch)
	r.bytes.Collect(ch)
}
