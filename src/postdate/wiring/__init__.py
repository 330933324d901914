"""Build adapters and endpoints from addresses and settings."""

from postdate.wiring.adapters import (
    absolute_address_of as absolute_address_of,
    check_store as check_store,
    check_transport as check_transport,
    file_of as file_of,
    load_library_facts as load_library_facts,
    find_file_inspector as find_file_inspector,
    open_store as open_store,
    open_transport as open_transport,
    settings_of_store as settings_of_store,
    with_absolute_files as with_absolute_files,
)
from postdate.wiring.causes import (
    advice_for as advice_for,
    name_setting_in_errors as name_setting_in_errors,
    locate_errors as locate_errors,
)
from postdate.wiring.deployment import (
    OpenDeployment as OpenDeployment,
    build_endpoint as build_endpoint,
    endpoints_to_run as endpoints_to_run,
    check_addresses as check_addresses,
    delay_exchange as delay_exchange,
    build_delayed_delivery as build_delayed_delivery,
    dispatcher_queues as dispatcher_queues,
    intake_queues as intake_queues,
    is_enabled as is_enabled,
    service_queues as service_queues,
    open_outbox as open_outbox,
    open_saga_store as open_saga_store,
    open_timeouts as open_timeouts,
    open_deployment as open_deployment,
    own_queues as own_queues,
    address_of_section as address_of_section,
    store_observer as store_observer,
    store_settings as store_settings,
    timeout_manager as timeout_manager,
    transport_settings as transport_settings,
)
from postdate.wiring.scripts import setup_sql as setup_sql
