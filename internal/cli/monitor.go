package cli

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/humanize"
)

func newMonitorCommand(env Env) *cobra.Command {
	var out output
	var socket agentSocket
	var types []string
	c := &cobra.Command{
		Use:   "monitor",
		Short: "Print packet events of this node, one line each",
		Long: "Print packet events of this node, one line each, until interrupted. At high rates one event " +
			"stands for\nseveral packets; the counters of \"pilaster status\" are exact. Packets that Open vSwitch " +
			"drops\n(switch ovs in \"pilaster status\") appear only in those counters, except those that an " +
			"eBPF\nprogram behind it drops.\n\nIn parentheses after an address: the pod or container on this node " +
			"that has it, and if it is an address\non the fabric, the one that containers of the tenant see. For an " +
			"encrypted tenant this needs its key,\nwhich nodes that host the tenant have.",
		Example: "  pilaster monitor --type drop\n  pilaster monitor -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			for _, t := range types {
				if t != "drop" {
					return usage("--type %q: use drop, the only type", t)
				}
			}
			stream, err := socket.client().
				Monitor(c.Context(), connect.NewRequest(&pilasterv1.MonitorRequest{Types: types}))
			if err != nil {
				return err
			}
			defer stream.Close()
			for stream.Receive() {
				if err := printEvent(env, out.format, viewEvent(stream.Msg())); err != nil {
					return err
				}
			}
			if c.Context().Err() != nil {
				return nil // interrupted by the user
			}
			return stream.Err()
		},
	}
	c.Flags().StringSliceVar(&types, "type", nil, "only events of this type: drop")
	_ = c.RegisterFlagCompletionFunc(
		"type",
		cobra.FixedCompletions([]string{"drop"}, cobra.ShellCompDirectiveNoFileComp),
	)
	socket.bind(c)
	out.bind(c)
	return c
}

// eventView is an event, for text and JSON.
type eventView struct {
	Time            string `json:"time"`
	Type            string `json:"type"`
	Reason          string `json:"reason"`
	Count           uint64 `json:"count"`
	Hook            string `json:"hook"`
	Source          string `json:"source,omitempty"`
	Destination     string `json:"destination,omitempty"`
	Protocol        uint32 `json:"protocol"`
	SourcePort      uint32 `json:"sourcePort,omitempty"`
	DestinationPort uint32 `json:"destinationPort,omitempty"`
	Length          uint32 `json:"length"`
	EndpointID      uint32 `json:"endpointId,omitempty"`
	Endpoint        string `json:"endpoint,omitempty"`
	Tenant          string `json:"tenant,omitempty"` // of the endpoint
	Ifindex         uint32 `json:"ifindex"`
	LostEvents      uint64 `json:"lostEvents,omitempty"`
	Policy          string `json:"policy,omitempty"` // that denied the packet
	Rule            string `json:"rule,omitempty"`
	// what this node knows of the two addresses; absent if it knows nothing
	SourceEnd      *packetEnd `json:"sourceEnd,omitempty"`
	DestinationEnd *packetEnd `json:"destinationEnd,omitempty"`
}

type packetEnd struct {
	Endpoint  string `json:"endpoint,omitempty"`  // pod or container id, if it is on this node
	Address   string `json:"address,omitempty"`   // as containers of the tenant see it
	Plaintext string `json:"plaintext,omitempty"` // on the fabric
}

func viewEnd(m *pilasterv1.PacketEnd) *packetEnd {
	if m == nil {
		return nil
	}
	return &packetEnd{m.Endpoint, m.Address, m.Plaintext}
}

// after is what follows an address of a packet: the name, and the address in containers if that is another one.
func (e *packetEnd) after(addr string) string {
	if e == nil {
		return ""
	}
	var known []string
	for _, one := range []string{e.Endpoint, e.Address} {
		if one != "" && one != addr {
			known = append(known, one)
		}
	}
	if len(known) == 0 {
		return ""
	}
	return " (" + strings.Join(known, ", ") + ")"
}

func viewEvent(m *pilasterv1.MonitorResponse) eventView {
	return eventView{
		Time: m.GetTime().
			AsTime().
			Format(time.RFC3339Nano),
		Type: m.GetType(), Reason: m.GetReason(), Count: m.GetCount(), Hook: m.GetHook(),
		Source: m.GetSource(), Destination: m.GetDestination(), Protocol: m.GetProtocol(),
		SourcePort: m.GetSourcePort(), DestinationPort: m.GetDestinationPort(),
		Length: m.GetLength(), EndpointID: m.GetEndpointId(), Endpoint: m.GetEndpoint(), Tenant: m.GetTenant(),
		Ifindex: m.GetIfindex(), LostEvents: m.GetLostEvents(),
		Policy: m.GetRule().GetPolicy(), Rule: m.GetRule().GetRule(),
		SourceEnd: viewEnd(m.GetSourceEnd()), DestinationEnd: viewEnd(m.GetDestinationEnd()),
	}
}

func printEvent(env Env, format string, e eventView) error {
	if format == "json" {
		return json.NewEncoder(env.Stdout).Encode(e)
	}
	_, err := fmt.Fprintln(env.Stdout, e.line())
	return err
}

// line formats an event as text: time, type, reason, packet, endpoint, count.
func (e eventView) line() string {
	at := e.Time
	if t, err := time.Parse(time.RFC3339Nano, e.Time); err == nil {
		at = t.Format("2006-01-02T15:04:05.000Z07:00")
	}
	who := e.Hook
	if e.EndpointID != 0 {
		who = fmt.Sprintf("%s of endpoint %d %s", e.Hook, e.EndpointID, e.Endpoint)
	}
	what := "not IP"
	if e.Source != "" {
		what = fmt.Sprintf(
			"%s → %s  %s",
			withPort(e.Source, e.SourcePort)+e.SourceEnd.after(e.Source),
			withPort(e.Destination, e.DestinationPort)+e.DestinationEnd.after(e.Destination),
			protocolName(e.Protocol),
		)
	}
	s := fmt.Sprintf(
		"%s  %s  %-18s  %s  %d bytes  at %s  ×%s",
		at,
		e.Type,
		e.Reason,
		what,
		e.Length,
		who,
		humanize.Grouped(e.Count),
	)
	if e.Rule != "" {
		s += "  by " + e.Rule
		if e.Tenant != "" {
			s += " (tenant " + e.Tenant + ")"
		}
	}
	if e.LostEvents > 0 {
		s += "  (" + humanize.Of(e.LostEvents, "event", "events") + " lost before)"
	}
	return s
}

func withPort(addr string, port uint32) string {
	if a, err := netip.ParseAddr(addr); err == nil && port != 0 {
		return netip.AddrPortFrom(a, uint16(port)).String()
	}
	return addr
}

func protocolName(p uint32) string {
	switch p {
	case 1:
		return "ICMP"
	case 6:
		return "TCP"
	case 17:
		return "UDP"
	case 44:
		return "fragment"
	case 58:
		return "ICMPv6"
	}
	return "protocol " + strconv.Itoa(int(p))
}
