package cli

import (
	"cmp"
	"fmt"
	"io"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

func newEndpointCommand(env Env) *cobra.Command {
	c := &cobra.Command{
		Use:     "endpoint",
		Short:   "Show the endpoints of this node, and change labels of containers",
		Example: "  pilaster endpoint list",
	}
	c.AddCommand(newEndpointListCommand(env), newEndpointGetCommand(env), newEndpointLabelCommand(env),
		newEndpointSetCommand(env))
	return c
}

func newEndpointListCommand(env Env) *cobra.Command {
	var out output
	var socket agentSocket
	c := &cobra.Command{
		Use:     "list",
		Short:   "List the endpoints of this node",
		Example: "  pilaster endpoint list\n  pilaster endpoint list -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			resp, err := socket.client().
				ListEndpoints(c.Context(), connect.NewRequest(&pilasterv1.ListEndpointsRequest{}))
			if err != nil {
				return err
			}
			views := []endpointView{}
			for _, e := range resp.Msg.Endpoints {
				views = append(views, viewEndpoint(e))
			}
			return out.print(env.Stdout, views, func(w io.Writer) {
				fmt.Fprintln(w, "ID\tCONTAINER\tTENANT\tAPP\tSTATE\tNETWORK\tADDRESS\tPLAINTEXT\tHOST PORTS")
				for _, v := range views {
					of := fmt.Sprintf("%d\t%s\t%s\t%d\t%s", v.ID, v.name(), v.Tenant, cmp.Or(v.AppNow, v.App), v.State)
					ports := "\t" + cmp.Or(listHostPorts(v.HostPorts), "-")
					for _, a := range v.Attachments {
						fmt.Fprintf(w, "%s\t%s\t%s\t%s%s\n", of, a.Network, a.Address, cmp.Or(a.Plaintext, "-"), ports)
						of, ports = "\t\t\t\t", "" // of the same endpoint
					}
				}
			})
		},
	}
	socket.bind(c)
	out.bind(c)
	return c
}

func newEndpointGetCommand(env Env) *cobra.Command {
	var out output
	var socket agentSocket
	c := &cobra.Command{
		Use:     "get ID|CONTAINER|POD|ADDRESS",
		Short:   "Show one endpoint of this node",
		Example: "  pilaster endpoint get default/web-0\n  pilaster endpoint get 3 -o json",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			resp, err := socket.client().
				GetEndpoint(c.Context(), connect.NewRequest(&pilasterv1.GetEndpointRequest{Key: args[0]}))
			if err != nil {
				return err
			}
			v := viewEndpoint(resp.Msg.Endpoint)
			return out.print(env.Stdout, v, v.text)
		},
	}
	socket.bind(c)
	c.ValidArgsFunction = names(socket.endpoints)
	out.bind(c)
	return c
}

func newEndpointLabelCommand(env Env) *cobra.Command {
	var out output
	var socket agentSocket
	c := &cobra.Command{
		Use:   "label ID|CONTAINER|POD|ADDRESS KEY=VALUE|KEY-...",
		Short: "Change the labels of a running container",
		Long: `Change the labels of a running container: KEY=VALUE sets a label, KEY- removes it. The container keeps
its address. Policies use the new labels: on this node when the command returns, on other nodes within
moments. The change lasts as long as the container; a new container gets the labels that its runtime
sets. The labels in the container's runtime are not changed.`,
		Example: "  pilaster endpoint label shop/web-0 tier=front\n  pilaster endpoint label 3 quarantine=yes tier-",
		Args:    cobra.MinimumNArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			req := &pilasterv1.LabelEndpointRequest{Key: args[0], Set: map[string]string{}}
			for _, arg := range args[1:] {
				if k, v, sets := strings.Cut(arg, "="); sets {
					if had, twice := req.Set[k]; twice && had != v {
						return usage("label %s has two values, %q and %q; nothing was changed; use one", k, had, v)
					}
					req.Set[k] = v
				} else if k, removes := strings.CutSuffix(arg, "-"); removes && k != "" {
					req.Remove = append(req.Remove, k)
				} else {
					return usage("%.100q: use KEY=VALUE to set a label, KEY- to remove it; nothing was changed", arg)
				}
			}
			resp, err := socket.client().LabelEndpoint(c.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			v := viewEndpoint(resp.Msg.Endpoint)
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintf(
					w,
					"endpoint %d %s: app %d, %s\n",
					v.ID,
					v.name(),
					cmp.Or(v.AppNow, v.App),
					orNone(tenant.Canonical(v.Labels)),
				)
			})
		},
	}
	socket.bind(c)
	c.ValidArgsFunction = names(socket.endpoints)
	out.bind(c)
	return c
}

func newEndpointSetCommand(env Env) *cobra.Command {
	var out output
	var socket agentSocket
	var ready, terminating bool
	c := &cobra.Command{
		Use:   "set ID|CONTAINER|POD|ADDRESS",
		Short: "Set whether services send new connections to a container",
		Long: `Set whether services send new connections to a running container. One that is not ready gets none. A
terminating one gets none unless its service has no other endpoint. TCP connections go on in both cases. A flag
that is left out changes nothing; --terminating=false undoes --terminating. The setting lasts as long as the
container.`,
		Example: "  pilaster endpoint set shop/web-0 --terminating\n  pilaster endpoint set 3 --ready=false",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			req := &pilasterv1.SetEndpointRequest{Key: args[0]}
			if c.Flags().Changed("ready") {
				req.Ready = &ready
			}
			if c.Flags().Changed("terminating") {
				req.Terminating = &terminating
			}
			if req.Ready == nil && req.Terminating == nil {
				return usage("nothing to set: use --ready, --terminating or both; nothing was changed")
			}
			resp, err := socket.client().SetEndpoint(c.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			v := viewEndpoint(resp.Msg.Endpoint)
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintf(w, "endpoint %d %s: %s\n", v.ID, v.name(), v.conditions())
			})
		},
	}
	socket.bind(c)
	c.Flags().BoolVar(&ready, "ready", true, "services send connections to it")
	c.Flags().BoolVar(&terminating, "terminating", false, "services send it no new connections if there are others")
	c.ValidArgsFunction = names(socket.endpoints)
	out.bind(c)
	return c
}

// conditions says whether services send new connections to the container.
func (v endpointView) conditions() string {
	return choose(v.NotReady, "not ready", "ready") + choose(v.Terminating, ", terminating", "")
}

// endpointView is an endpoint, for text and JSON.
type endpointView struct {
	ID          uint32 `json:"id"`
	ContainerID string `json:"containerId"`
	Interface   string `json:"interface"`
	Pod         string `json:"pod,omitempty"`
	Netns       string `json:"netns"`
	CNINetwork  string `json:"cniNetwork,omitempty"`
	Tenant      string `json:"tenant"`
	TenantID    uint32 `json:"tenantId"`
	App         uint32 `json:"app"` // the app in the endpoint's addresses
	// the app that policies use, if the labels have changed
	AppNow       uint32            `json:"appNow,omitempty"`
	Labels       map[string]string `json:"labels"`
	State        string            `json:"state"`
	NotReady     bool              `json:"notReady,omitempty"`    // services send it no connections
	Terminating  bool              `json:"terminating,omitempty"` // services send it no new ones if there are others
	Attachments  []attachmentView  `json:"attachments"`
	HostPorts    []hostPortView    `json:"hostPorts,omitempty"`
	DeviceKind   string            `json:"deviceKind"`
	HostDevice   string            `json:"hostDevice"`  // empty with a macvlan
	HostIfindex  uint32            `json:"hostIfindex"` // 0 with a macvlan
	ContainerMAC string            `json:"containerMac"`
	MTU          uint32            `json:"mtu"`
	Created      string            `json:"created"`
	NodeAddress  string            `json:"nodeAddress,omitempty"` // of endpoint get: address of the node for this container
}

// hostPortView has the keys of portMappings in the CNI conventions.
type hostPortView struct {
	HostPort      uint32 `json:"hostPort"`
	ContainerPort uint32 `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP,omitempty"` // empty: all addresses of the node
}

func (v hostPortView) String() string {
	at := fmt.Sprint(v.HostPort)
	if v.HostIP != "" {
		at = fmt.Sprintf("[%s]:%d", v.HostIP, v.HostPort)
	}
	return fmt.Sprintf("%s/%s to %d", at, strings.ToUpper(v.Protocol), v.ContainerPort)
}

// listHostPorts lists host ports for a line of text.
func listHostPorts(all []hostPortView) string {
	texts := make([]string, len(all))
	for i, v := range all {
		texts[i] = v.String()
	}
	return strings.Join(texts, ", ")
}

type attachmentView struct {
	Network   string   `json:"network"`
	Plaintext string   `json:"plaintext,omitempty"` // of a network without own CIDRs
	Address   string   `json:"address"`
	Gateway   string   `json:"gateway"`
	Routes    []string `json:"routes"`
	Egress    string   `json:"egress,omitempty"` // the address at which hosts outside of the cluster see it
}

func viewEndpoint(e *pilasterv1.Endpoint) endpointView {
	v := endpointView{
		ID: e.GetId(), ContainerID: e.GetContainerId(), Interface: e.GetInterface(), Pod: e.GetPod(),
		Netns:      e.GetNetns(),
		CNINetwork: e.GetCniNetwork(), Tenant: e.GetTenant(), TenantID: e.GetTenantId(), App: e.GetApp(),
		AppNow: e.GetAppNow(), Labels: e.GetLabels(),
		State: e.GetState(), DeviceKind: e.GetDeviceKind(), HostDevice: e.GetHostDevice(),
		HostIfindex: e.GetHostIfindex(), ContainerMAC: e.GetContainerMac(),
		MTU: e.GetMtu(), Created: timeText(e.GetCreated()), NodeAddress: e.GetNodeAddress(),
		NotReady: e.GetNotReady(), Terminating: e.GetTerminating(), Attachments: []attachmentView{},
	}
	if v.Labels == nil {
		v.Labels = map[string]string{}
	}
	for _, a := range e.GetAttachments() {
		v.Attachments = append(v.Attachments, attachmentView{
			a.Network, a.Plaintext, a.Address, a.Gateway, a.Routes, a.Egress,
		})
	}
	for _, p := range e.GetHostPorts() {
		v.HostPorts = append(v.HostPorts, hostPortView{
			p.Host, p.Container, strings.ToLower(p.Protocol), p.Address,
		})
	}
	return v
}

func (v endpointView) name() string {
	if v.Pod != "" {
		return v.Pod
	}
	return v.ContainerID
}

func (v endpointView) text(w io.Writer) {
	row := func(name string, value any) { fmt.Fprintf(w, "%s\t%v\n", name, value) }
	row("endpoint", fmt.Sprintf("%d, %s", v.ID, v.State))
	if v.NotReady || v.Terminating {
		row("", "for services: "+v.conditions())
	}
	row("container", v.ContainerID+" "+v.Interface)
	if v.Pod != "" {
		row("pod", v.Pod)
	}
	row("tenant", fmt.Sprintf("%s, id %d", v.Tenant, v.TenantID))
	row("app", fmt.Sprintf("%d, %s", cmp.Or(v.AppNow, v.App), orNone(tenant.Canonical(v.Labels))))
	if v.AppNow != 0 {
		row("", fmt.Sprintf("its addresses contain app %d: its labels have changed", v.App))
	}
	for _, a := range v.Attachments {
		row(a.Network, a.Address+"\taddress in the container")
		if a.Plaintext != "" {
			row("", a.Plaintext+"\taddress on the fabric")
		}
		if a.Egress != "" {
			row("", a.Egress+"\taddress for hosts outside")
		}
		for _, r := range a.Routes {
			row("", r+" via "+a.Gateway)
		}
	}
	if len(v.HostPorts) > 0 {
		row("host ports", listHostPorts(v.HostPorts))
	}
	if v.NodeAddress != "" {
		row("node", v.NodeAddress+"\taddress of the node for the container")
	}
	device := fmt.Sprintf("%s, index %d", v.HostDevice, v.HostIfindex)
	if v.HostDevice == "" {
		device = "on the uplink"
	}
	row(
		"device",
		fmt.Sprintf(
			"%s, MTU %d, container's MAC %s",
			strings.TrimSpace(v.DeviceKind+" "+device),
			v.MTU,
			v.ContainerMAC,
		),
	)
	row("netns", v.Netns)
	row("since", v.Created)
}
