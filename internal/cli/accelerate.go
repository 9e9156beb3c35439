package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/accelerate"
	"pilaster.io/pilaster/internal/accelerate/overlay"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/oncache"
)

// accelerateSocket is the socket of the daemon of accelerate.
type accelerateSocket struct{ daemonSocket }

func (s *accelerateSocket) bind(c *cobra.Command, flag string) {
	s.daemonSocket.bind(c, flag, "PILASTER_ACCELERATE_SOCKET", "/run/pilaster/accelerate.sock", "accelerate daemon")
}

func (s *accelerateSocket) client() accelerate.Client { return accelerate.Client{Socket: s.path} }

// context returns the command's context with the deadline of --timeout.
func (s *accelerateSocket) context() (context.Context, context.CancelFunc) {
	return context.WithTimeout(s.command.Context(), time.Duration(*s.command.Flag(timeoutFlag).Value.(*patience)))
}

func newAccelerateCommand(env Env) *cobra.Command {
	var o accelerate.Options
	var socket accelerateSocket
	var containers string
	c := &cobra.Command{
		Use:   "accelerate",
		Short: "Cache what another network's VXLAN overlay does with packets",
		Long: `Run a daemon that caches what the VXLAN overlay of another container network, such as Flannel or Calico,
does with the packets of a connection, so that later packets of it bypass most of the overlay's devices.
The daemon finds the parameters of the overlay's device and its containers, and follows their changes.

It refuses to start if the overlay's verdict about a packet depends on more than the connection, and names
the rule or device (docs/reference/accelerate.md). While it does not run, or is paused, the overlay works
alone. The daemon sets net.netfilter.nf_conntrack_tcp_be_liberal=1 if connections are tracked, and restores
it at its end.`,
		Example: "  pilaster accelerate --uplink eth0 --overlay flannel.1 --containers bridge:cni0\n" +
			"  pilaster accelerate --uplink eth0 --overlay vxlan.calico --containers 'veth:cali*'",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if os.Geteuid() != 0 {
				return usage("pilaster accelerate needs root: it loads eBPF programs")
			}
			if o.Containers, err = overlay.ParseContainers(containers); err != nil {
				return usage("--containers %q: %w", containers, err)
			}
			if err := oncache.CheckMarkMask(o.MarkMask); err != nil {
				return usage("--mark-mask: %w", err)
			}
			o.Socket, o.Log = socket.path, slog.New(slog.NewTextHandler(env.Stderr, nil))
			return accelerate.Run(c.Context(), o)
		},
	}
	f := c.Flags()
	f.StringVar(&o.Uplink, "uplink", "", "device to the other nodes")
	f.StringVar(&o.Overlay, "overlay", "", "VXLAN device of the overlay, such as flannel.1")
	f.StringVar(&containers, "containers", "", "the node's devices of containers: bridge:NAME, the ports of a bridge, "+
		"or veth:PATTERN, veths by name")
	f.Uint32Var(&o.MarkMask, "mark-mask", oncache.DefaultMarkMask,
		"six or more contiguous bits of packets' marks that no rule of this node uses")
	f.Lookup("mark-mask").DefValue = fmt.Sprintf("%#x", oncache.DefaultMarkMask)
	f.StringVar(&o.MetricsListen, "metrics-listen", "", "host:port for /metrics, /healthz and /readyz "+
		"(default: on the socket only)")
	socket.bind(c, "socket")
	for _, name := range []string{"uplink", "overlay", "containers"} {
		_ = c.MarkFlagRequired(name)
	}
	_ = c.RegisterFlagCompletionFunc("uplink", deviceNames("", ""))
	_ = c.RegisterFlagCompletionFunc("overlay", deviceNames("vxlan", ""))
	_ = c.RegisterFlagCompletionFunc("containers", deviceNames("bridge", "bridge:"))
	c.AddCommand(newAccelerateStatus(env), newAcceleratePause(env), newAccelerateEvict(env), newAccelerateResume(env),
		newAccelerateReset(env))
	return c
}

// deviceNames completes the names of this network namespace's devices of a type, or of any but lo, after a prefix.
func deviceNames(kind, prefix string) cobra.CompletionFunc {
	return func(*cobra.Command, []string, string) (all []string, _ cobra.ShellCompDirective) {
		names, _ := overlay.Devices(kind) // without devices, there is nothing to offer
		for _, name := range names {
			all = append(all, prefix+name)
		}
		return all, cobra.ShellCompDirectiveNoFileComp
	}
}

func newAccelerateStatus(env Env) *cobra.Command {
	var socket accelerateSocket
	var out output
	c := &cobra.Command{
		Use:   "status",
		Short: "Show what is cached, and what keeps the cache from being used",
		Long: "Show the overlay and its containers, the entries of the cache, hits and misses, and what keeps the " +
			"cache from being used. The exit status is 1 if packets do not use it.",
		Example: "  pilaster accelerate status\n  pilaster accelerate status -o json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			ctx, cancel := socket.context()
			defer cancel()
			s, err := socket.client().Status(ctx)
			if err != nil {
				return err
			}
			if err := out.print(env.Stdout, s, acceleration(s).text); err != nil {
				return err
			}
			if !s.InUse {
				return &exitError{code: ExitFailed}
			}
			return nil
		},
	}
	socket.bind(c, "socket")
	out.bind(c)
	return c
}

// acceleration is the status of accelerate, as text.
type acceleration accelerate.Status

func (a acceleration) text(w io.Writer) {
	row := func(name, format string, args ...any) { fmt.Fprintf(w, name+"\t"+format+"\n", args...) }
	row("state", "%s", a.state())
	for _, p := range a.Problems {
		row("problem", "%s", p)
	}
	learning := "no learning"
	if a.Overlay.Learning {
		learning = "learning"
	}
	row("overlay", "%s: VNI %d, UDP port %d, local VTEP %s, %s, uplink %s", a.Overlay.Device, a.Overlay.VNI,
		a.Overlay.Port, a.Overlay.Local, learning, a.Uplink)
	row("other VTEPs", "%d", len(a.Overlay.VTEPs))
	row("containers", "%d of %s %s", len(a.Containers.Devices), a.Containers.Which,
		strings.Join(a.Containers.Devices, " "))
	for _, device := range slices.Sorted(maps.Keys(a.Containers.Excluded)) {
		row("excluded", "%s", a.Containers.Excluded[device])
	}
	row("entries", "%d flows, %d containers of %d other nodes, %d containers here", a.Entries.Flows, a.Entries.Remote,
		a.Entries.VTEPs, a.Entries.Local)
	for _, d := range []struct {
		name string
		accelerate.DirectionStatus
	}{{"egress", a.Egress}, {"ingress", a.Ingress}} {
		row(d.name, "%d hits, %d misses%s, hit rate %.1f %%", d.Hits, d.Missed(), byCause(d.Misses), 100*d.Rate)
		if causes := byCause(d.NotLearnt); causes != "" {
			row("not learnt", "%s%s", d.name, causes)
		}
	}
	row("lease", "renewed %.1f s ago; without the daemon the cache is off after %.0f s", a.Lease.Age, a.Lease.Expires)
	row("changes", "without an event (iptables-legacy, ipset) take effect within %.0f s", a.Validity)
	for _, s := range a.Settings {
		row("setting", "%s=%s (was %s)", strings.ReplaceAll(s.Name, "/", "."), s.Value, s.Before)
	}
	row("evictions", "%d entries%s", a.Evicted, byCause(a.Evictions))
}

// byCause returns counters other than 0.
func byCause(counters map[string]uint64) string {
	var all []string
	for _, cause := range slices.Sorted(maps.Keys(counters)) {
		if n := counters[cause]; n > 0 {
			all = append(all, fmt.Sprintf("%s %d", cause, n))
		}
	}
	if len(all) == 0 {
		return ""
	}
	return " (" + strings.Join(all, ", ") + ")"
}

func (a acceleration) state() string {
	switch {
	case len(a.Problems) > 0:
		return "not in use until the problems below are gone"
	case a.InUse:
		return "in use"
	case a.Paused:
		return "paused by an operator: learns nothing; `pilaster accelerate resume` ends it"
	}
	return "not in use"
}

func newAcceleratePause(env Env) *cobra.Command {
	var socket accelerateSocket
	c := &cobra.Command{
		Use:   "pause",
		Short: "Learn nothing until resume",
		Long: `Learn nothing until resume. What is cached stays in use until evict, or until its validity of at most
10 s ends. To change the overlay so that afterwards no packet is forwarded as before: pause, evict what the
change concerns, change, resume.`,
		Example: "  pilaster accelerate pause",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			ctx, cancel := socket.context()
			defer cancel()
			if _, err := socket.client().Pause(ctx); err != nil {
				return err
			}
			fmt.Fprintln(env.Stdout, "the cache learns nothing until resume")
			return nil
		},
	}
	socket.bind(c, "socket")
	return c
}

func newAccelerateResume(env Env) *cobra.Command {
	var socket accelerateSocket
	c := &cobra.Command{
		Use:     "resume",
		Short:   "Learn again after pause",
		Long:    "Learn again after pause. The exit status is 1 if the cache is not used because of a problem.",
		Example: "  pilaster accelerate resume",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			ctx, cancel := socket.context()
			defer cancel()
			s, err := socket.client().Resume(ctx)
			if err != nil {
				return err
			}
			if !s.InUse {
				return fmt.Errorf("the cache is still not in use:\n  %s", strings.Join(s.Problems, "\n  "))
			}
			fmt.Fprintln(env.Stdout, "the cache is in use")
			return nil
		},
	}
	socket.bind(c, "socket")
	return c
}

func newAccelerateEvict(env Env) *cobra.Command {
	var socket accelerateSocket
	var q accelerate.EvictRequest
	var address, vtep string
	c := &cobra.Command{
		Use:   "evict",
		Short: "Remove entries of the cache",
		Long:  "Remove entries of the cache. The next packets of these connections take the overlay's way.",
		Example: "  pilaster accelerate evict --all\n  pilaster accelerate evict --address 10.244.1.7\n" +
			"  pilaster accelerate evict --vtep 192.0.2.2",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) (err error) {
			if address != "" {
				if q.Address, err = netip.ParseAddr(address); err != nil {
					return usage("--address %q is no IP address", address)
				}
			}
			if vtep != "" {
				if q.VTEP, err = netip.ParseAddr(vtep); err != nil {
					return usage("--vtep %q is no IP address", vtep)
				}
			}
			ctx, cancel := socket.context()
			defer cancel()
			n, err := socket.client().Evict(ctx, q)
			if err != nil {
				return err
			}
			fmt.Fprintf(env.Stdout, "evicted %s\n", humanize.Of(n, "entry", "entries"))
			return nil
		},
	}
	c.Flags().BoolVar(&q.All, "all", false, "all entries")
	c.Flags().StringVar(&address, "address", "", "entries with this address of a container")
	c.Flags().StringVar(&vtep, "vtep", "", "entries of containers behind this VTEP")
	c.Flags().StringVar(&q.Container, "container", "", "entries of the container with this device")
	_ = c.RegisterFlagCompletionFunc("container", deviceNames("veth", ""))
	c.MarkFlagsOneRequired("all", "address", "vtep", "container")
	c.MarkFlagsMutuallyExclusive("all", "address", "vtep", "container")
	socket.bind(c, "socket")
	return c
}

func newAccelerateReset(env Env) *cobra.Command {
	var socket accelerateSocket
	c := &cobra.Command{
		Use:   "reset",
		Short: "Detach everything and restore the settings",
		Long: `Detach all programs from the overlay, restore the settings that the daemon changed, and end the daemon.
Without a daemon, as after a crash, no program is attached, and the command restores the settings. It must
run in the network namespace of the daemon.`,
		Example: "  pilaster accelerate reset",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if os.Geteuid() != 0 {
				return usage("pilaster accelerate reset needs root: it changes settings of the kernel")
			}
			ctx, cancel := socket.context()
			defer cancel()
			undone, err := socket.client().Reset(ctx)
			for _, s := range undone {
				fmt.Fprintf(env.Stdout, "%s is %s again\n", strings.ReplaceAll(s.Name, "/", "."), s.Before)
			}
			if err != nil {
				return errors.Join(err, errors.New("the overlay works; run the command again"))
			}
			fmt.Fprintln(env.Stdout, "the overlay works without the cache")
			return nil
		},
	}
	socket.bind(c, "socket")
	return c
}
