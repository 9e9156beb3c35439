package endpoint

// Kinds of device that join a container to the node: the values of Device.Kind.
const (
	Veth    = "veth"
	Macvlan = "macvlan"
	Netkit  = "netkit"
)
