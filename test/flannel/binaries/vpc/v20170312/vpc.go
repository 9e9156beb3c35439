// Package v20170312 stands for the client of Tencent Cloud's routing tables, so that Flannel builds without it: its
// real module is large, and not every module proxy has it. Flannel's backend tencent-vpc, which the tests do not use,
// gets an error from each call.
package v20170312

import "errors"

var errAbsent = errors.New("this build of Flannel has no backend tencent-vpc")

// Client is a client whose calls fail.
type Client struct{}

// NewClientWithSecretId returns a client whose calls fail.
func NewClientWithSecretId(_, _, _ string) (*Client, error) { return &Client{}, errAbsent }

// Filter selects objects of a request.
type Filter struct {
	Name   *string
	Values []*string
}

// Route is a route.
type Route struct {
	RouteId, DestinationCidrBlock, GatewayType, GatewayId, RouteType *string
	Enabled                                                          *bool
}

// RouteTable is a routing table.
type RouteTable struct {
	RouteTableId *string
	RouteSet     []*Route
}

// RouteTables is the content of a response.
type RouteTables struct{ RouteTableSet []*RouteTable }

// DescribeRouteTablesRequest asks for routing tables.
type DescribeRouteTablesRequest struct{ Filters []*Filter }

// DescribeRouteTablesResponse has routing tables.
type DescribeRouteTablesResponse struct{ Response *RouteTables }

// NewDescribeRouteTablesRequest returns an empty request.
func NewDescribeRouteTablesRequest() *DescribeRouteTablesRequest {
	return &DescribeRouteTablesRequest{}
}

// DescribeRouteTables fails.
func (*Client) DescribeRouteTables(*DescribeRouteTablesRequest) (*DescribeRouteTablesResponse, error) {
	return nil, errAbsent
}

// RoutesRequest names routes of a table.
type RoutesRequest struct {
	RouteTableId *string
	Routes       []*Route
}

// NewDeleteRoutesRequest returns an empty request.
func NewDeleteRoutesRequest() *RoutesRequest { return &RoutesRequest{} }

// NewCreateRoutesRequest returns an empty request.
func NewCreateRoutesRequest() *RoutesRequest { return &RoutesRequest{} }

// DeleteRoutes fails.
func (*Client) DeleteRoutes(*RoutesRequest) (*struct{}, error) { return nil, errAbsent }

// CreateRoutes fails.
func (*Client) CreateRoutes(*RoutesRequest) (*struct{}, error) { return nil, errAbsent }
