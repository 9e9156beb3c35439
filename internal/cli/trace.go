package cli

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/trace"
)

// traceFlags are the flags of both trace commands.
type traceFlags struct {
	out     output
	dryRun  bool
	wait    atMost
	backend string // of the service that is the destination; empty: any
	ingress string // node by which a packet of a host outside comes in; empty: this one, or that of the fabric's route
	port    uint16 // of the source; 0: any
}

// bind adds the flags. ingress is the end of that flag's help.
func (f *traceFlags) bind(c *cobra.Command, ingress string) {
	f.out.bind(c)
	c.Flags().BoolVar(&f.dryRun, "dry-run", false, "only read the tables; send and follow no packet")
	c.Flags().StringVar(&f.backend, "backend", "",
		"`address` of an endpoint of the service that is the destination, with --dry-run; empty: the first one")
	c.Flags().StringVar(&f.ingress, "ingress", "",
		"`node` by which the packet of a host outside comes in"+ingress)
	bindSourcePort(c, &f.port)
	c.Flags().Var(&f.wait, "wait", "follow a packet that the source itself sends in this time, at most 10m, instead "+
		"of a probe")
}

// ingressNode returns the /64 of a node by its name, its /64 or its address; empty if it is not given.
func (s *agentSocket) ingressNode(
	ctx context.Context, given string, orchestrator *orchestratorSocket,
) (prefix string, err error) {
	if given == "" {
		return "", nil
	}
	at, err := netip.ParseAddr(strings.TrimSuffix(given, fmt.Sprint("/", address.NodeBits)))
	if err != nil {
		known := false
		if at, known = s.nodeAddress(ctx, given, orchestrator); !known {
			return "", usage("--ingress %s: neither this node nor an orchestrator on this machine knows a node with "+
				"this name; use its /64", given)
		}
	}
	return address.Split(at).Node.String(), nil
}

// bindSourcePort adds the flag for the source port of a connection.
func bindSourcePort(c *cobra.Command, port *uint16) {
	c.Flags().Uint16Var(port, "source-port", 0,
		"port of the source, by which an exposed port chooses the endpoint; 0: not known")
}

func newTraceCommand(env Env) *cobra.Command {
	var flags traceFlags
	var socket agentSocket
	var orchestrator orchestratorSocket
	var tenant string
	var peerApp uint16
	c := &cobra.Command{
		Use:   "trace SOURCE DESTINATION [PROTOCOL[/PORT]]",
		Short: "Show the way of a packet: stages, entries, addresses",
		Long: `Show the way of a packet from one container to another, to a host outside of the cluster or to a
node, or from a node to a container: the stages on this node, the table entry that each hits, and the addresses
after each, which shows where the network translates them. The command sends one packet from the source and
follows it through the programs: an ICMP echo request without PROTOCOL, else a TCP SYN or an empty UDP datagram.
With --wait it sends nothing and follows the first such packet. With --dry-run it only reads the tables.

It shows the part of the way that is on this node, and names the node with the other part. To see both
parts of one packet, start the command on the node of the destination first: with --wait 1m it waits there for
the packet. Then run it on the node of the source. In a lab, pilaster lab trace shows the whole way.

SOURCE and DESTINATION are addresses, or names of endpoints on this node. One may be the name of a
node; names of other nodes come from an orchestrator on this machine. For the part of an egress gateway, run
the command on its node, with the source's address on the fabric. The way back is traced for exposed ports only, with
--dry-run.

A packet of a host outside to an exposed port of a service is traced on its ingress node. Nothing of Pilaster runs on
that host, so without --dry-run the command waits for such a packet. On the node of the endpoint, give the endpoint's
address and port, and --ingress. The client's port chooses the endpoint: --source-port says which one it is.

As with pilaster why, --peer-app and --tenant say what addresses of a tenant's own CIDRs do not contain. Of Open
vSwitch a live trace shows where it takes and delivers a packet; a dry run shows its flows. If frontends look up
the rules, the command only reads the tables; pilaster lab trace shows the whole way.

The exit status is 0 if the packet is delivered, sent to another node or leaves the cluster, and 1 if it is
dropped or not seen.`,
		Example: `  pilaster trace shop/front fc98:14bc:4974:c7a8:470f:98a:c932:1f42 tcp/80
  pilaster trace $SOURCE $DESTINATION --dry-run
  pilaster trace $SOURCE $DESTINATION udp/53 --wait 10s -o json
  pilaster trace 2001:db8:f00d::2 2001:db8:7::9 tcp/443 --source-port 51234 --dry-run`,
		Args: cobra.RangeArgs(2, 3),
		RunE: func(c *cobra.Command, args []string) error {
			if err := socket.resolveEnds(c.Context(), args[:2], &orchestrator); err != nil {
				return err
			}
			job, err := newTraceJob(&flags, args)
			if err != nil {
				return err
			}
			job.tenant = tenant
			job.nodes = []traceNode{{client: socket.client(), peerApp: uint32(peerApp)}}
			job.exposedBy = func(ctx context.Context) string { return exposedBy(ctx, orchestrator.client(), job.ask) }
			if job.ingress, err = socket.ingressNode(c.Context(), flags.ingress, &orchestrator); err != nil {
				return err
			}
			return job.run(c.Context(), env)
		},
	}
	flags.bind(c, " (name or /64); empty: this node")
	socket.bind(c)
	orchestrator.bind(c)
	c.ValidArgsFunction = socket.offerEnds
	c.Flags().StringVar(&tenant, "tenant", "", "tenant of the addresses, if its CIDRs are its own")
	c.Flags().Uint16Var(&peerApp, "peer-app", 0,
		"app of the end that is not on this node, if the tenant's CIDRs are its own")
	return c
}

// traceJob is one trace over some nodes.
type traceJob struct {
	*traceFlags
	ask      whyView // addresses, protocol and port
	tenant   string
	nodes    []traceNode                  // the sender's first
	from, to string                       // names to show; empty for those of the agents
	whole    bool                         // all nodes with a part of the way are asked
	note     string                       // to show
	silent   func(context.Context) string // what to add about frontends without an answer; nil if nothing is known
	nodeWith func(prefix string) string   // names a node; nil if no names are known
	// frontend returns a node that looks up the rules of an offload; nil if only the nodes above are asked.
	frontend func(prefix string) traceNode
	// nodeAt returns the node with a prefix, to which the packet goes on; nil if only the nodes above are asked.
	nodeAt func(prefix string) traceNode
	// probeBy sends the probe of a host outside; nil if agents send probes.
	probeBy   func(context.Context) (packet.ProbeAnswer, error)
	ingress   string                       // /64 of the ingress node of a packet of a host outside; empty: not known
	exposedBy func(context.Context) string // who exposes the destination; nil if that is not asked
}

type traceNode struct {
	client  pilasterv1connect.AgentServiceClient
	peerApp uint32
}

// newTraceJob reads two addresses and an optional protocol.
func newTraceJob(flags *traceFlags, args []string) (*traceJob, error) {
	if flags.dryRun && flags.wait != 0 {
		return nil, usage("--dry-run only reads the tables and waits for no packet: leave out --wait, or --dry-run")
	}
	if wait := time.Duration(flags.wait); wait > dpapi.LongestTrace {
		return nil, usage("--wait %v: a trace ends after %v; wait at most so long", wait, dpapi.LongestTrace)
	}
	if flags.backend != "" && !flags.dryRun {
		return nil, usage("the packet path picks the endpoint of a service: --backend needs --dry-run")
	}
	if len(args) == 2 || strings.EqualFold(args[2], "ping") {
		echo := "icmpv6"
		if a, err := address.ParseAny(args[0]); err == nil && a.Is4() {
			echo = "icmp"
		}
		args = append(slices.Clone(args[:2]), echo)
	}
	ask, err := askWhy(args)
	if err == nil && ask.Source == ask.Destination {
		err = usage("both ends have the address %v: a container's packets to itself never leave it, so there is "+
			"nothing to trace; nothing was sent", ask.Source)
	}
	if err == nil && ask.Source.Is4() != ask.Destination.Is4() {
		err = usage("%v and %v are of two families; use addresses of one", ask.Source, ask.Destination)
	}
	if echo := map[bool]uint8{true: 58, false: 1}[ask.Source.Is4()]; err == nil && ask.Protocol == echo {
		err = usage("%s is not a protocol of %v; use icmp with IPv4 and icmpv6 with IPv6", args[2], ask.Source)
	}
	if err == nil && flags.port != 0 && ask.Port == 0 {
		err = usage("--source-port %d: a packet of protocol %d has no ports", flags.port, ask.Protocol)
	}
	ask.SourcePort = flags.port
	return &traceJob{traceFlags: flags, ask: ask}, err
}

func (j *traceJob) run(ctx context.Context, env Env) error {
	parts, err := j.parts(ctx)
	if err != nil {
		return err
	}
	t := j.merge(parts)
	switch offloaded := usesFrontend(parts); {
	case j.dryRun || len(t.Steps) == 0:
	case offloaded:
		j.note = "the rules are looked up by frontends, which a live trace does not show, so no packet was sent"
		if j.silent != nil {
			j.note += j.silent(ctx)
		}
	default:
		if t, err = j.live(ctx, env.Stderr, t, parts); err != nil {
			return err
		}
	}
	if j.whole {
		t.Elsewhere = ""
	}
	if t.Verdict == trace.Passed && j.exposedBy != nil {
		j.note = j.exposedBy(ctx)
	}
	if t.Note = j.note; t.Elsewhere != "" && j.nodeWith != nil {
		t.ElsewhereName = j.nodeWith(t.Elsewhere)
	}
	if err := j.out.print(env.Stdout, t, t.Text); err != nil {
		return err
	}
	if t.Verdict == trace.Delivered || t.Verdict == trace.Left || t.Verdict == trace.Sent && !j.whole {
		return nil
	}
	return &exitError{code: ExitFailed}
}

// merge puts the parts of nodes together, with what the user has asked for.
func (j *traceJob) merge(parts []*pilasterv1.TraceResponse) trace.Trace {
	t := trace.Merge(parts...)
	t.Protocol, t.Port = j.ask.Protocol, j.ask.Port
	t.Source.Name, t.Destination.Name = cmp.Or(j.from, t.Source.Name), cmp.Or(j.to, t.Destination.Name)
	t.Source.Address = cmp.Or(t.Source.Address, j.ask.Source.String())
	t.Destination.Address = cmp.Or(t.Destination.Address, j.ask.Destination.String())
	return t
}

// silentFrontends names the frontends that do not answer the probes of nodes, as lines for a note.
func silentFrontends(
	ctx context.Context,
	of pilasterv1connect.OperatorServiceClient,
	tenant string,
	nodes ...string,
) string {
	all, err := of.ListOffloads(ctx, connect.NewRequest(&pilasterv1.ListOffloadsRequest{Tenant: tenant}))
	if err != nil {
		return "" // the trace is complete without it
	}
	text := ""
	for _, o := range all.Msg.Offloads {
		if node := o.Offload.GetNode(); len(o.LostFrontends) > 0 && slices.Contains(nodes, node) {
			text += fmt.Sprintf("\n%s gets no answers to its probes from %s, which may lose packets", node,
				strings.Join(o.LostFrontends, ", "))
		}
	}
	return text
}

// usesFrontend reports whether a frontend looks up the rules for the packet.
func usesFrontend(parts []*pilasterv1.TraceResponse) bool {
	return slices.ContainsFunc(parts, func(p *pilasterv1.TraceResponse) bool {
		return len(p.Frontends) > 0 || p.Pre != nil
	})
}

// parts asks the nodes what they do with the packet. If the rules are looked up by one of several frontends, it asks
// the first of them, and then the backend with what that says: all have the same rules.
func (j *traceJob) parts(ctx context.Context) ([]*pilasterv1.TraceResponse, error) {
	var parts []*pilasterv1.TraceResponse
	var pre *pilasterv1.PreActions
	ingress := j.ingress
	source, destination, port := j.ask.Source.String(), j.ask.Destination.String(), uint32(j.ask.Port)
	ask := func(n traceNode) (*pilasterv1.TraceResponse, error) {
		resp, err := n.client.Trace(ctx, connect.NewRequest(&pilasterv1.TraceRequest{
			Source: source, Destination: destination, Protocol: uint32(j.ask.Protocol), Port: port, Tenant: j.tenant,
			PeerApp: n.peerApp, Pre: pre, Backend: j.backend, SourcePort: uint32(j.ask.SourcePort), Ingress: ingress,
		}))
		if err != nil {
			return nil, err
		}
		parts, pre = append(parts, resp.Msg), resp.Msg.Pre
		if steps := resp.Msg.Steps; resp.Msg.Source.GetIsNode() && len(steps) > 0 {
			source = steps[len(steps)-1].Source // that the kernel chooses
		}
		return resp.Msg, nil
	}
	for i, n := range j.nodes {
		part, err := ask(n)
		if err != nil {
			return nil, err
		}
		if j.frontend == nil || len(part.Frontends) == 0 {
			continue
		}
		if _, err := ask(j.frontend(part.Frontends[0])); err != nil {
			return nil, err
		}
		if i == len(j.nodes)-1 { // it asked a frontend, and goes on with the answer
			if _, err := ask(n); err != nil {
				return nil, err
			}
		}
	}
	first := parts[0]
	if trace.IsExposed(parts) {
		ingress = first.Prefix
	} else {
		source = first.Source.GetPlaintext()
	}
	isService := slices.ContainsFunc(first.Steps, func(s *pilasterv1.TraceStep) bool { return s.Stage == "service" })
	if first.Verdict == trace.Left || first.Verdict == trace.Delivered || isService {
		j.note = ""
	}
	// A packet that leaves by this node may also leave by the other gateway of its rule.
	goesOn := first.Verdict == trace.Sent || first.Verdict == trace.Left && !j.dryRun
	if j.nodeAt == nil || source == "" || !goesOn {
		return parts, nil
	}
	if len(first.Backends) > 0 { // the other nodes see a packet to the backend
		destination, port = first.Backends[0].Plaintext, first.Backends[0].Port
	}
	next := first.Gateways
	if len(next) == 0 && first.Verdict == trace.Sent && first.Next != "" {
		next = []string{first.Next}
	}
	for _, prefix := range next {
		n := j.nodeAt(prefix)
		if _, err := ask(n); err != nil {
			return nil, err
		}
		j.nodes, j.whole, j.note = append(j.nodes, n), true, ""
	}
	return parts, nil
}
