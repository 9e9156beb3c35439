package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/demo"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/modules"
	"pilaster.io/pilaster/internal/tenant"
)

// labFlags select one of the labs on this machine.
type labFlags struct{ root, name string }

func (f *labFlags) choose() (string, error) { return lab.Choose(f.root, f.name) }

// bindName lets a command accept the lab's name also as its only argument, in addition to the flag --lab.
func (f *labFlags) bindName(c *cobra.Command) {
	c.Args = cobra.MaximumNArgs(1)
	c.ValidArgsFunction = names(func(context.Context) ([]string, error) { return lab.List(f.root) })
	run := c.RunE
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 1 {
			if f.name != "" && f.name != args[0] {
				return usage("the argument names lab %s, and --lab names lab %s; use one of them", args[0], f.name)
			}
			f.name = args[0]
		}
		return run(c, args)
	}
}

func (f *labFlags) open() (*lab.Lab, error) {
	name, err := f.choose()
	if err != nil {
		return nil, err
	}
	return lab.Open(f.root, name)
}

// offer completes the first count arguments of a command with names from the lab. It completes later arguments as rest
// says.
func (f *labFlags) offer(count int, rest cobra.ShellCompDirective, of func(*lab.Lab) []string) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) >= count {
			return nil, rest
		}
		l, err := f.open()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return of(l), cobra.ShellCompDirectiveNoFileComp
	}
}

// requireRoot returns an error of one line if the process does not run as root.
func requireRoot(what string) error {
	if os.Geteuid() != 0 {
		return usage("pilaster %s needs root: it creates network namespaces and loads eBPF programs", what)
	}
	return nil
}

func newLabCommand(env Env) *cobra.Command {
	var flags labFlags
	c := &cobra.Command{
		Use:   "lab",
		Short: "Run a cluster in network namespaces of this machine, with the real daemons",
		Example: `  pilaster lab up -f demo.yaml
  pilaster lab ping
  pilaster lab exec b1 -- ip -6 addr
  pilaster lab down`,
		Args:              cobra.NoArgs,
		PersistentPreRunE: func(*cobra.Command, []string) error { return requireRoot("lab") },
	}
	c.PersistentFlags().StringVar(&flags.root, "lab-root", cmp.Or(os.Getenv("PILASTER_LAB_ROOT"), lab.DefaultRoot),
		"folder of all labs (PILASTER_LAB_ROOT)")
	c.PersistentFlags().StringVar(&flags.name, "lab", "", "name of the lab; not needed if only one is up")
	labs := func(context.Context) ([]string, error) { return lab.List(flags.root) }
	_ = c.RegisterFlagCompletionFunc(
		"lab",
		func(c *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			return names(labs)(c, nil, typed)
		},
	)
	c.AddCommand(newLabUp(env, &flags), newLabDown(env, &flags), newLabStatus(env, &flags), newLabExec(env, &flags),
		newLabMove(env, &flags), newLabRoute(env, &flags), newLabAllowSource(env, &flags),
		newLabPing(env, &flags), newLabTrace(env, &flags),
		newLabSupervise(env), newLabHold(), newLabOVS())
	return c
}

// labHelp describes the networks' tenants and keys, a paragraph each.
func labHelp() string {
	var b strings.Builder
	for _, m := range modules.All() {
		if m.LabHelp != "" {
			b.WriteString(m.LabHelp + "\n\n")
		}
	}
	return b.String()
}

func newLabUp(env Env, flags *labFlags) *cobra.Command {
	spans := tenant.Networks(tenant.Regions)[0]
	var file string
	var arguments []string
	c := &cobra.Command{
		Use:   "up -f FILE",
		Short: "Start a lab from a YAML file",
		Long: `Start a lab from a YAML file:

  name: demo                     # default: the file's name
  nodes: [n1, n2, n3]            # or, with a rack: {name: n1, rack: a}
  device: veth                   # default; how containers are connected to nodes: veth, macvlan, netkit, auto
  mtuReserve: 96                 # default 0; the agents' --mtu-reserve
  tenants: [{name: blue}, {name: red, addressing: clear}]
  containers:
    - {name: b1, node: n1, tenant: blue, labels: {app: web}}
    - {name: b2, node: n1, tenant: blue, publish: ["8080:80"]} # host ports, [IP:]HOST:CONTAINER[/udp]

Hosts outside of the cluster, and tenants that may reach them and processes of nodes:

  outside: [internet]            # hosts behind the fabric's router, with addresses of 2001:db8:f00d::/48, or
                                 # with another address: "internet=2001:db8:9::2"
  egressPrefix: 2001:db8:e::/48  # default none; the orchestrator's --egress-prefix
  uplinks: 2                     # default 1; the second one of each node leads to the hosts outside
  tenants:
    - name: blue
      egress: [{to: "::/0", action: allow}, {to: "2001:db8:9::/48", action: allow, via: [n1]}]
      nodes: allow               # default none; as of pilaster tenant set --nodes

` + labHelp() +
			`A lab can have several regions, each with its own orchestrator, nodes and CIDRs:

  regions:
    - {name: west, basePrefix: "fd70:696c:6100::/40", nodes: [w1, w2], edge: we}
    - {name: east, basePrefix: "fd70:696c:6200::/40", nodes: [e1], edge: ee}
  tenants: [{name: blue, network: ` + spans + `, regions: {west: [10.0.0.0/16], east: [10.1.0.0/16]}}]`,
		Example: "  pilaster lab up -f demo.yaml\n" +
			"  pilaster lab up -f demo.yaml --orchestrator-arg=--list-rate=100",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			spec, err := lab.ReadSpec(file)
			if err != nil {
				return &exitError{ExitUsage, err}
			}
			binary, err := os.Executable()
			if err != nil {
				return err
			}
			started := time.Now()
			l, err := lab.Up(
				c.Context(),
				spec,
				lab.Options{
					Root: flags.root, Binary: binary, OrchestratorArgs: arguments, Progress: func(what string) {
						fmt.Fprintf(env.Stderr, "%5.1f s  %s\n", time.Since(started).Seconds(), what)
					},
				},
			)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(env.Stdout, "lab %s is up in %.1f s (nodes: %d, tenants: %d, containers: %d)\n",
				l.Name(), time.Since(started).Seconds(), len(spec.AllNodes()), len(spec.Tenants), len(spec.Containers))
			return err
		},
	}
	c.Flags().StringVarP(&file, "file", "f", "", "the YAML file")
	c.Flags().StringArrayVar(&arguments, "orchestrator-arg", nil,
		"argument of the orchestrator (see pilaster orchestrator); may be repeated")
	_ = c.MarkFlagRequired("file")
	return c
}

func newLabDown(env Env, flags *labFlags) *cobra.Command {
	c := &cobra.Command{
		Use:     "down [NAME]",
		Short:   "Remove a lab, even if it has crashed",
		Example: "  pilaster lab down\n  pilaster lab down demo",
		RunE: func(c *cobra.Command, _ []string) error {
			name, err := flags.choose()
			if err != nil {
				return err
			}
			if err := lab.Down(c.Context(), flags.root, name); err != nil {
				return err
			}
			_, err = fmt.Fprintf(env.Stdout, "lab %s is down\n", name)
			return err
		},
	}
	flags.bindName(c)
	return c
}

func newLabStatus(env Env, flags *labFlags) *cobra.Command {
	var out output
	c := &cobra.Command{
		Use:     "status [NAME]",
		Short:   "Show nodes, containers and processes of a lab",
		Example: "  pilaster lab status\n  pilaster lab status demo -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			l, err := flags.open()
			if err != nil {
				return err
			}
			s, err := l.Status(c.Context())
			if err != nil {
				return err
			}
			return out.print(env.Stdout, s, func(w io.Writer) { printLab(w, s) })
		},
	}
	flags.bindName(c)
	out.bind(c)
	return c
}

func printLab(w io.Writer, s lab.Status) {
	supervisor := fmt.Sprint("supervisor ", s.Supervisor)
	if s.Supervisor == 0 {
		supervisor = "no supervisor runs, processes are not restarted; remove the lab with: pilaster lab down " + s.Name
	}
	pid := func(p int) string {
		switch {
		case p != 0:
			return fmt.Sprint(p)
		case s.Supervisor == 0:
			return "unknown"
		}
		return "not running"
	}
	fmt.Fprintf(w, "LAB\t%s\t%s\n", s.Name, supervisor)
	if len(s.Regions) == 0 {
		fmt.Fprintf(w, "ORCHESTRATOR\t%s\tpid %s\n", s.Orchestrator.Listen, pid(s.Orchestrator.PID))
	}
	for _, r := range s.Regions {
		fmt.Fprintf(
			w,
			"REGION %s\t%v\torchestrator %s, pid %s\n",
			r.Name,
			r.BasePrefix,
			r.Orchestrator.Listen,
			pid(r.Orchestrator.PID),
		)
	}
	fmt.Fprintln(w)
	fmt.Fprint(w, "NODE\tPREFIX\tAGENT PID\tRESTARTS\n")
	for _, n := range s.Nodes {
		name := n.Name
		if n.Edge {
			name += " (edge of " + n.Region + ")"
		} else if n.Region != "" {
			name += " (" + n.Region + ")"
		}
		fmt.Fprintf(w, "%s\t%v\t%s\t%d\n", name, n.Prefix, pid(n.AgentPID), n.AgentRestarts)
	}
	if len(s.Outside) > 0 {
		fmt.Fprint(w, "\nOUTSIDE\tADDRESS\n")
	}
	for _, h := range s.Outside {
		fmt.Fprintf(w, "%s\t%v\n", h.Name, h.Address)
	}
	fmt.Fprint(w, "\nCONTAINER\tNODE\tTENANT\tAPP\tADDRESS\tON THE FABRIC\tPID\n")
	for _, c := range s.Containers {
		fmt.Fprintf(
			w,
			"%s\t%s\t%s\t%d\t%s\t%s\t%s\n",
			c.Name,
			c.Node,
			c.Tenant,
			c.App,
			commaList(c.Addresses),
			onFabric(c.Attachments),
			pid(c.PID),
		)
	}
	for _, n := range s.Nodes {
		if n.Silent {
			fmt.Fprintf(
				w,
				"the agent of %s does not answer: the addresses of its containers are the last known ones\n",
				n.Name,
			)
		}
	}
}

// onFabric lists the addresses of a container that packets on the fabric have.
func onFabric(all []lab.Attachment) string {
	var shown []string
	for _, a := range all {
		what := "encapsulated"
		switch {
		case a.Plaintext.IsValid():
			what = a.Plaintext.String()
		case a.OnFabric.IsValid():
			what = a.OnFabric.String()
		}
		if !slices.Contains(shown, what) {
			shown = append(shown, what)
		}
	}
	return strings.Join(shown, ", ")
}

func newLabExec(env Env, flags *labFlags) *cobra.Command {
	return &cobra.Command{
		ValidArgsFunction: flags.offer(1, cobra.ShellCompDirectiveDefault, (*lab.Lab).ExecTargets),
		Use:               "exec NAME -- COMMAND…",
		Short:             "Run a command in a container or on a node",
		Long: `Run a command in a container, on a node, in the orchestrator's namespace ("orchestrator", or the name
of a region), on the fabric ("router") or on a host outside. It exits with the command's status. In the lab, "pilaster"
is the lab's own binary, and environment variables point it to the lab's daemons and folders.`,
		Example: "  pilaster lab exec b1 -- ip -6 addr\n  pilaster lab exec n1 -- pilaster status\n  pilaster lab " +
			"exec router -- ip -6 route",
		Args: cobra.MinimumNArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			l, err := flags.open()
			if err != nil {
				return err
			}
			if _, err := l.Refresh(c.Context()); err != nil { // for /etc/hosts
				return err
			}
			cmd := exec.Command(args[1], args[2:]...)
			cmd.Stdin, cmd.Stdout, cmd.Stderr = env.Stdin, env.Stdout, env.Stderr
			if err := l.Launch(args[0], cmd); err != nil {
				return err
			}
			// The terminal sends SIGINT to the command. Forward other signals to it.
			term := make(chan os.Signal, 1)
			signal.Notify(term, syscall.SIGTERM, syscall.SIGHUP)
			go func() {
				for s := range term {
					_ = cmd.Process.Signal(s) // fails if the command has ended
				}
			}()
			err = cmd.Wait()
			signal.Stop(term)
			close(term)
			if status, ran := lab.ExitStatus(err); ran && status != 0 {
				return &exitError{code: status}
			}
			return err
		},
	}
}

func newLabMove(env Env, flags *labFlags) *cobra.Command {
	keyed := tenant.NetworksWith(tenant.AddressKeys)
	var out output
	var to string
	c := &cobra.Command{
		Use:               "move CONTAINER --to NODE",
		ValidArgsFunction: flags.offer(1, cobra.ShellCompDirectiveNoFileComp, (*lab.Lab).ContainerNames),
		Short:             "Move a container to another node, with its address and open connections",
		Long: `Move a container to another node. Its processes, its address and its open connections stay: the new
node's agent attaches a second device, the cluster moves the address, and the former node's agent removes its
device. The sessions of connections under policies are copied to the new node.

The container's tenant is on network ` + keyed + `, and the container has an addressKey in the lab's file.`,
		Example: "  pilaster lab move s1 --to n3\n  pilaster lab move s1 --to n3 -o json",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if to == "" {
				return usage("--to is missing: name the node to move the container to")
			}
			l, err := flags.open()
			if err != nil {
				return err
			}
			m, err := l.Move(c.Context(), args[0], to)
			if err != nil {
				return err
			}
			return out.print(env.Stdout, m, func(w io.Writer) {
				fmt.Fprintf(w, "%s moved from %s to %s with address %v\n", m.Container, m.From, m.To, m.Address)
				fmt.Fprintf(w, "  attached in\t%v\n  removed from %s in\t%v\n  sessions copied\t%d",
					m.Attach.Round(time.Millisecond), m.From, m.Remove.Round(time.Millisecond), m.Later)
				if m.Left > 0 {
					fmt.Fprintf(w, ", and no room for %d", m.Left)
				}
				fmt.Fprintln(w)
			})
		},
	}
	c.Flags().StringVar(&to, "to", "", "the node to move it to")
	nodes := flags.offer(1, cobra.ShellCompDirectiveNoFileComp, (*lab.Lab).NodeNames)
	_ = c.RegisterFlagCompletionFunc(
		"to",
		func(c *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			return nodes(c, nil, typed)
		},
	)
	out.bind(c)
	return c
}

func newLabSupervise(env Env) *cobra.Command {
	return &cobra.Command{
		Use:    "supervise FOLDER",
		Short:  "Supervise the daemons of one lab; started by lab up",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return lab.Supervise(c.Context(), args[0], slog.New(slog.NewTextHandler(env.Stderr, nil)))
		},
	}
}

func newLabHold() *cobra.Command {
	return &cobra.Command{
		Use:    "hold",
		Short:  "Process of a container; started by lab up",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(c *cobra.Command, _ []string) error { return lab.Pause(c.Context()) },
	}
}

func newLabOVS() *cobra.Command {
	return &cobra.Command{
		Use:    "ovs FOLDER",
		Short:  "Run a node's Open vSwitch; started by lab up",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE:   func(c *cobra.Command, args []string) error { return lab.RunOVS(c.Context(), args[0]) },
	}
}

// commaList joins values with commas.
func commaList[T fmt.Stringer](values []T) string {
	var texts []string
	for _, v := range values {
		texts = append(texts, v.String())
	}
	return strings.Join(texts, ", ")
}

func newDemoCommand(env Env) *cobra.Command {
	var o demo.Options
	c := &cobra.Command{
		Use:     "demo",
		Short:   "Start a network of 3 nodes on this machine, verify it, and remove it",
		Example: "  pilaster demo\n  pilaster demo --keep",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if err := requireRoot("demo"); err != nil {
				return err
			}
			o.Command = os.Args[0]
			if o.Binary, err = os.Executable(); err != nil {
				return err
			}
			return demo.Run(c.Context(), env.Stdout, o)
		},
	}
	c.Flags().BoolVar(&o.Keep, "keep", false, "keep the network, and print commands to look at it")
	c.Flags().StringVar(&o.Root, "lab-root", os.Getenv("PILASTER_LAB_ROOT"), "folder of all labs (PILASTER_LAB_ROOT)")
	return c
}
